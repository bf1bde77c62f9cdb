"""The learning rate of a step: linear warm-up, then constant or along a cosine."""

import math

FLOOR = 0.1  # of the full rate, at the end of the cosine, as GPT-3 has it (Brown et al. 2020, appendix B)


def learning_rate(config, step: int) -> float:
    """The rate of step `step`, counted from 0: a function of the settings and of the step alone, so that a resumed run
    goes on with what it would have had.

    The rate grows in equal parts over the first `warmup_steps`. After that it is `lr`; or, with the schedule "cosine",
    it falls along half a cosine to FLOOR of `lr` in the last of `steps` (Loshchilov & Hutter 2017, equation 5).
    """
    warm_up = config.warmup_steps
    if step < warm_up:
        return config.lr * (step + 1) / warm_up
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step + 1 - warm_up) / max(1, config.steps - warm_up))
    return config.lr * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)
