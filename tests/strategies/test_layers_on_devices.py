"""A step with layers on several devices of one process, call by call. tests/strategies/test_layers.py has the rest."""

import copy
from contextlib import contextmanager

import torch
from helpers import launcher

from common.lab import equality
from common.mesh import make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.strategy import Setup
from course.model_parallel import layers_on_devices


def batches() -> list:
    """Two micro-batches of four examples."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(equality.VOCABULARY, (2, 4, equality.CONTEXT + 1), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def test_a_step_of_layers_on_devices_asks_its_scaler_in_order():
    """Losses are multiplied by 8 before the backward pass, and gradients divided before they are clipped."""
    calls = []

    class Scaler:
        scale = staticmethod(lambda loss: calls.append("scale") or 8 * loss)
        update = staticmethod(lambda: calls.append("update"))
        step = staticmethod(lambda optimizer: calls.append("step") or optimizer.step())

        @staticmethod
        def unscale_(optimizer):
            calls.append("unscale")
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad /= 8

    @contextmanager
    def autocast():
        calls.append("autocast")
        yield

    with launcher(), process_group("cpu"):
        strategy = layers_on_devices.LayersOnDevices(
            equality.tied(),
            equality.sgd,
            Setup(make_mesh({"data": 1}), max_norm=1e-3),
            devices=[torch.device("cpu")] * 9,
        )
        assert len(strategy.devices) == 4, "no more devices than layers"
        plain, examples = copy.deepcopy(strategy.model), batches()
        strategy.scaler, strategy.autocast = Scaler, autocast
        _, norm = strategy.step(examples)
        assert calls == ["autocast", "scale"] * 2 + ["unscale", "step", "update"], "what a step calls, in order"
        loss = strategy.evaluate(*examples[0])
        assert not loss.requires_grad and calls.pop() == "autocast", "validation: as training, without gradients"
    cross_entropy(plain(torch.cat([x for x, _ in examples])), torch.cat([y for _, y in examples])).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(norm, expected, msg="the norm of the gradients, unscaled and not yet clipped")
    assert layers_on_devices.LayersOnDevices.data_axes == (), "a process reads the whole batch, beside others too"
