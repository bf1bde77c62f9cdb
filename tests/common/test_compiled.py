"""--compile and --fused: the same numbers as without, by blocks that really were compiled; refused where they can't be.

Every strategy with --compile: `make test-all`.
"""

import pytest
import torch
from helpers import FULL, config_of, configure, every_strategy, numbers, refused, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common import compiled
from common.lab.launch import launch
from common.model import GPT
from common.strategy import use_tf32

CASES = [(1, "single", "pytorch", ""), (1, "dp", "pytorch", ""), (1, "dp", "by-hand", ""), *every_strategy()]
SELECTED = CASES if FULL else [(1, "fsdp", "pytorch", "")]  # whose hooks are the most


def train_and_count(configs):
    from torch._dynamo.utils import counters

    train(configs)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("size, strategy, implementation, line", SELECTED)
def test_a_compiled_run_has_the_numbers_of_one_that_is_not(tmp_path, size, strategy, implementation, line):
    line += " --steps 3 --checkpoint-every 0"
    plain = config_of(tmp_path, size, strategy, implementation, line)
    fast = config_of(tmp_path, size, strategy, implementation, f"{line} --compile aot_eager")
    assert launch(train, size, ([plain],)) == [None] * size
    assert min(launch(train_and_count, size, ([fast],), timeout=200)) > 0
    assert numbers(fast.run_dir) == numbers(plain.run_dir)


def test_parameters_keep_their_names_and_other_models_are_compiled_whole():
    model = GPT(2, 16, 2, 8)
    names = [*model.state_dict()]
    assert compiled.compile_blocks(model, "eager") == [*model.blocks]
    assert [*model.state_dict()] == names and model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 256)
    plain = nn.Sequential(nn.Linear(2, 2))
    assert compiled.compile_blocks(plain, "eager") == [plain]


class Kernels(TorchDispatchMode):
    """Notes the kernels of whole steps of Adam."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.called |= {name} if name.startswith("_fused_adam") else set()
        return func(*args, **(kwargs or {}))


def train_and_see_kernels(configs):
    with Kernels() as kernels:
        train(configs)
    return kernels.called


def test_a_fused_step_has_nearly_the_numbers_of_another(tmp_path):
    line = "--steps 3 --checkpoint-every 0"
    plain, fused = [config_of(tmp_path, 1, "fsdp", line=line + more) for more in ("", " --fused")]
    assert launch(train_and_see_kernels, 1, ([plain],)) == [set()]
    assert launch(train_and_see_kernels, 1, ([fused],)) == [{"_fused_adamw_"}]
    assert numbers(fused.run_dir) == pytest.approx(numbers(plain.run_dir), rel=1e-5)
    with refused("--fused", "adamw"):
        configure("--fused --optimizer sgd")


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    with refused("--compile zyzzyva", "inductor"):
        configure("--compile zyzzyva")
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("--compile inductor", "g++", "aot_eager"):
        configure("--compile")


def test_a_cpu_has_no_tf32():
    with refused("--tf32", "cpu"):
        use_tf32(torch.device("cpu"))
