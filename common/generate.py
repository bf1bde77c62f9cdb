"""Let the model of a run write.

    python -m common.generate RUN
    python -m common.generate RUN --prompt "def " --length 200

On this one process, from the newest checkpoint that is whole, whatever strategy wrote it on however many ranks. A run
is named by its folder, or by the name of a folder under runs/.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from common import installed

if __name__ == "__main__":
    installed.at_start()  # first: without the packages, one line and not a traceback

from common.constants import MOST_WRITTEN
from common.errors import Parser, UserError, finite, one_line_errors
from common.runs import History, checkpoint_of
from common.stored import Settings

if TYPE_CHECKING:
    from common.model import GPT

# torch, and what imports it, is imported where it is used: a wrong value is refused before.


def model_of(run: History, step: int | None = None) -> "GPT":
    """The GPT of a run's checkpoint: after `step` steps, by default of the newest one that is whole. Raises UserError
    for a run that trained another model."""
    from common.checkpoint import whole_tensors
    from common.model import GPT

    config = run.settings
    if run.unit != "tokens":
        raise UserError(f"{run.path} trained on --task {config.task}; only a model of text can write")
    if "experts" in run.facts.config:
        raise UserError(f"{run.path} trained a mixture of experts; here is the plain GPT only, so name another run")
    tensors = whole_tensors(checkpoint_of(run, step))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if config.layers > len(shapes) or config.width % config.heads or shapes != shapes_of(config):
        raise UserError(f"{run.path}: the checkpoint's tensors are not those of the model in config.json")
    model = GPT(config.layers, config.width, config.heads, config.context)
    model.load_state_dict(tensors | {"head.out.weight": tensors["embedding.tokens.weight"]})  # one tensor, stored once
    return model.eval()


def shapes_of(config: Settings) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a GPT with these settings, of which none is made."""
    import torch

    from common.model import GPT

    with torch.device("meta"):
        state = GPT(config.layers, config.width, config.heads, config.context).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head.out.weight"}


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python -m common.generate", description=__doc__.splitlines()[0])
    top.add_argument("run", metavar="RUN")
    top.add_argument("--prompt", default="def ", help="what it goes on from (default: 'def ')")
    top.add_argument("--length", type=int, default=200, help="bytes that it writes (default: 200)")
    top.add_argument("--temperature", type=finite, default=0.8, help="0: always the likeliest byte (default: 0.8)")
    top.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    top.add_argument("--step", type=int, help="of which checkpoint (default: the newest that is whole)")
    return top


def main(argv: list[str]) -> None:
    asked = parser().parse_args(argv)
    if not asked.prompt:
        raise UserError("--prompt is empty, and the model goes on from something; give it a byte or more")
    if asked.length > MOST_WRITTEN:
        raise UserError(f"--length must be at most {MOST_WRITTEN}, got {asked.length}: each byte is a forward pass")
    if asked.length < 1:
        raise UserError(f"--length must be at least 1, got {asked.length}")
    if not 0 <= asked.temperature < float("inf"):
        raise UserError(f"--temperature must be 0 or more, got {asked.temperature}")
    run = History(asked.run)
    from common.sample import sample

    model, context = model_of(run, asked.step), run.settings.context
    print(sample(model, context, asked.length, asked.prompt, asked.temperature, asked.seed))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
