"""A task's weights, optimizer and batches, and what every strategy inherits: literal values, not the code's own."""

from types import SimpleNamespace

import pytest
import torch
from helpers import configure, refused
from torch import nn

from common.data import OwnStream
from common.lab.launch import launch
from common.random_state import random_state, set_random_state
from common.strategy import can_compute, require_gradients
from common.task import Task, check_batch, make_task

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16}


def weights(config) -> float:
    return make_task(config).make_model().embedding.tokens.weight.sum().item()


def first_batch(config) -> list:
    return make_task(config).micro_batches(0, SimpleNamespace(data_rank=0, data_size=1, device="cpu"))[0][0].tolist()


def test_weights_and_the_order_of_data_come_from_the_seed_alone():
    configs = [configure(strategy="single", seed=seed, **SMALL) for seed in (0, 1)]
    torch.manual_seed(99)
    first = [weights(config) for config in configs]
    torch.manual_seed(100)
    assert [weights(config) for config in configs] == first, "the seed was not set"
    assert first[0] != first[1], "two seeds give the same weights"
    one, again, other = map(first_batch, (configs[0], *configs))
    assert one == again != other, "the first batch, by seed"


def kinds_of_memory(configs) -> list[bool]:
    return [next(make_task(config).make_model().parameters()).is_meta for config in configs]


def test_ranks_that_get_rank_0s_weights_have_a_model_without_memory():
    configs = [configure(size=2, strategy=name, **SMALL) for name in ("ddp", "fsdp")]
    assert launch(kinds_of_memory, 2, (configs,)) == [[False, False], [False, True]], (
        "who has a model on meta: fsdp's rank 1"
    )


def test_optimizers():
    """AdamW as GPT-3 was trained (Brown et al. 2020, appendix B): betas 0.9 and 0.95, weight decay 0.1."""
    parameters = [nn.Parameter(torch.ones(2))]
    adamw = make_task(configure(lr=0.25, **SMALL)).make_optimizer(parameters)
    assert type(adamw).__name__ == "AdamW"
    group = adamw.param_groups[0]
    told = {"lr": 0.25, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    assert {name: group[name] for name in told} == told
    sgd = make_task(configure(optimizer="sgd", lr=0.25, **SMALL)).make_optimizer(parameters)
    assert type(sgd).__name__ == "SGD", "--optimizer sgd makes another one"
    group = sgd.param_groups[0]
    told = {"lr": 0.25, "momentum": 0.9, "weight_decay": 0, "nesterov": False}
    assert {name: group[name] for name in told} == told


@pytest.mark.parametrize(
    ("batch", "told"),
    [(3, "4"), (9, "8"), (6, "8"), (11, "12")],
)
def test_a_batch_that_cannot_be_cut(batch, told):
    with refused(f"--batch-size {batch}", "2", "4", told):
        check_batch(configure(batch_size=batch, accumulation_steps=2), 2)
    check_batch(configure(batch_size=12, accumulation_steps=2), 2)


def test_more_examples_than_there_are_in_a_batch(tmp_path):
    """In a folder inside of a hidden one, whose own files are not hidden."""
    (tmp_path / ".hidden" / "poems").mkdir(parents=True)
    (tmp_path / ".hidden" / "poems" / "one.txt").write_bytes(b"a" * 400)
    settings = {"text": tmp_path / ".hidden" / "poems", "context": 16}
    assert make_task(configure(batch_size=23, **settings)).dataset.size == 23, "380 bytes to train on, 16 an example"
    with refused("--batch-size 24", "23"):
        make_task(configure(batch_size=24, **settings))


def test_of_a_stream_as_many_examples_are_validated_on_as_of_a_dataset():
    for there, taken in ((300, 256), (7, 7)):
        held_out = OwnStream([(torch.tensor(n), torch.tensor(-n)) for n in range(there)], "mine.py")
        found = Task(held_out, configure(f"--task {__file__}", strategy="single"), held_out).validation_data()
        assert found.size == taken and found.batch(torch.tensor([taken - 1]))[1].tolist() == [1 - taken]


def test_the_model_of_pictures_is_as_the_pictures_are():
    task = Task(SimpleNamespace(channels=3, classes=7), configure("--task images", strategy="single"))
    model = task.make_model()
    assert (model.conv1.in_channels, model.fc.out_features) == (3, 7), "channels and classes of the data"


def test_random_numbers_of_a_device_go_on_with_those_of_the_cpu(monkeypatch):
    device, taken_up = torch.device("cuda", 1), []
    module = SimpleNamespace(
        get_rng_state=lambda of: torch.tensor([7 * of.index]),
        set_rng_state=lambda state, of: taken_up.append((state.tolist(), of)),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    states = random_state(device)
    drawn = torch.rand(3)
    set_random_state(states, device)
    assert torch.equal(torch.rand(3), drawn), "the CPU's numbers go on where they were"
    assert taken_up == [([7], device)], "and the device's, on that device"
    set_random_state(states, torch.device("cpu")), set_random_state(states[:1], device)
    assert len(taken_up) == len(random_state(torch.device("cpu"))) == 1, "where one of both was a CPU"


def test_a_gpu_that_emulates_bf16_is_refused(monkeypatch):
    assert [can_compute("cpu", precision) for precision in ("bf16", "fp32")] == [True, True], "a CPU computes in both"
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: torch.eye(1))
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert can_compute("cuda", "bf16") is supported, "emulated bf16 is none"
        assert can_compute("cuda", "fp16") is True


def test_a_parameter_without_a_gradient_is_named_and_frozen_ones_are_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with refused("1.weight", "3"):
        require_gradients(model)
    model[1](torch.ones(2)).sum().backward()
    with refused("2.weight", "1"):
        require_gradients(model)
    with refused("1.bias"):
        require_gradients(model, without={model[1].bias, model[0].weight})
    require_gradients(model, without=set())
