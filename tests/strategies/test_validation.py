"""The loss on text that is not trained on: exact over ranks, with every strategy; training goes on as without it."""

import math
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, SMALL, config_of, configure, every_strategy, metrics, numbers, train

from common import data, validation
from common.errors import UserError
from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import GPT, cross_entropy
from common.state import local_of
from common.strategy import Strategy
from common.task import make_task
from common.validation import validate
from course.model_parallel.moe_model import MixtureGPT
from course.strategies import STRATEGIES, load

AT_ONCE = 6  # examples on each rank: of 13 one is left for a second round on two ranks, and none for the last of four


def sharpen(model) -> None:
    """Larger weights, so that losses of examples differ by more than rounding does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta and parameter.dim() > 1:
                parameter.mul_(4)


def held(model) -> int:
    """Bytes of its parameters' memory on this rank, of which units that are not gathered have none."""
    tensors = [local_of(parameter.detach()) for parameter in model.parameters()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def watch_contexts() -> list[int]:
    """How many contexts of a strategy's precision this process is in, from now on."""
    autocast, depth = Strategy.autocast, [0]

    @contextmanager
    def noting(strategy):
        depth[0] += 1
        with autocast(strategy):
            yield
        depth[0] -= 1

    Strategy.autocast = noting  # this process ends here
    return depth


def watch_layers(model, depth: list[int], noted: set) -> None:
    """Note of each layer that computes its kind, whether it does in the run's precision, and whether for a backward
    pass."""

    def note(layer, args):
        noted.add((type(layer).__name__, depth[0] > 0, torch.is_grad_enabled()))

    for layer in model.modules():
        if any(True for _ in layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(note)


def otherwise(noted: set, backward: bool) -> set:
    """What was noted and should not have been; nothing was noted in vain."""
    wrong = {layer for layer in noted if layer[1:] != (True, backward)} or ({"no layer"} if not noted else set())
    noted.clear()
    return wrong


def skips_what_overflows(strategy, batch) -> bool:
    """Whether nothing moves on this rank, and the loss scale is halved, when one element of the gradient is infinite,
    of those that rank 1 holds: on all ranks that hold it, and on no other. One of a tensor that is cut, if there is."""
    parts, unscale = [part for part in strategy.parts() if part.owner is not None], strategy.scaler.unscale_
    places = {
        part.name: part.where.take(torch.arange(math.prod(part.where.shape)).view(part.where.shape)) for part in parts
    }
    several = [part.name for part in parts if len(places[part.name]) < math.prod(part.where.shape)]
    chosen = [(name := (several or [*places])[0], int(places[name][0]))] if dist.get_rank() == 1 else [None]
    dist.broadcast_object_list(chosen, src=1)

    def overflow(optimizer):
        for part in parts:
            if part.name == chosen[0][0]:
                own = local_of(part.owner.grad).view(-1)[part.span or slice(None)]
                own[places[part.name] == chosen[0][1]] = float("inf")
        return unscale(optimizer)

    strategy.scaler.unscale_ = overflow
    before, scale = [part.tensor.clone() for part in strategy.parts()], strategy.scaler.get_scale()
    strategy.step(batch)
    strategy.scaler.unscale_ = unscale
    still = all(torch.equal(part.tensor, was) for part, was in zip(strategy.parts(), before, strict=True))
    return still and strategy.scaler.get_scale() == scale / 2


def validated(configs) -> list[list[float]]:
    """For each configuration: the loss on 13 examples, that of a step, and the loss on 13 examples after the step."""
    validation.EXAMPLES, found, depth = 13, [], watch_contexts()
    for config in configs:
        task, mesh = make_task(config), make_mesh(config.axes, "cpu")
        model = task.make_model()
        sharpen(model)
        strategy = config.strategy_class(model, task.make_optimizer, config.setup(mesh))
        text = task.validation_data()
        kept, noted, who = held(strategy.model), set(), f"{config.strategy} {config.implementation} {config.axes}"
        watch_layers(strategy.model, depth, noted)
        before = validate(strategy, text, AT_ONCE)
        wrong = otherwise(noted, False)
        assert not wrong, f"{who}: (layer, in --precision, for a backward pass) that are not (True, False): {wrong}"
        assert held(strategy.model) == kept, f"{who}: bytes held, where what validation gathers is given back"
        step = float(strategy.step(task.micro_batches(0, strategy))[0])
        wrong = otherwise(noted, True)
        assert not wrong, f"{who}: (layer, in --precision, for a backward pass) that are not (True, True): {wrong}"
        found.append([before, step, validate(strategy, text, AT_ONCE)])
        if config.precision == "fp16":
            assert skips_what_overflows(strategy, task.micro_batches(1, strategy)), (
                f"{who}: all skip a step together and halve the scale, whichever rank overflowed"
            )
        with torch.no_grad():
            for part in strategy.parts():
                part.tensor.zero_()  # as if it were loaded: now all tokens are as likely
        strategy.after_loading()
        of_zeros, who = validate(strategy, text, AT_ONCE), f"{config.strategy} {config.precision}"
        assert of_zeros == pytest.approx(math.log(256), rel=1e-5), f"{who}: the loss with what was loaded"
    return found


def test_every_strategy_finds_the_loss_of_one_process(tmp_path):
    rows = [row for row in sorted(every_strategy()) if FULL or row[1] != "tensor+fsdp"]  # 6 s, for DTensor's rules
    rows += [(4, "mesh", "by-hand", "--mesh context=2,data=2")]
    fp16 = [(4, "mesh", "by-hand", f"--mesh {axes}") for axes in ("pipeline=2,data=2", "shard=2,tensor=2")]
    fp16 += [(4, "mesh", "pytorch", "--mesh pipeline=2,tensor=2"), (4, "expert", "by-hand", "--mesh data=2,expert=2")]
    fp16 += [(4, "hsdp", "by-hand", ""), (4, "pipeline+fsdp", "pytorch", ""), (2, "pipeline", "pytorch", "")]
    fp16 += [(2, name, "pytorch", "") for name in ("ddp", "zero2", *["tensor"] * FULL)]
    fp16 += [
        (2, name, "by-hand", "")
        for name, entry in STRATEGIES.items()
        if "by-hand" in entry.places and 2 in entry.sizes("by-hand") and len(load(name, "by-hand").preset) == 1
    ]
    rows += [(*who, f"{line} --precision fp16") for *who, line in fp16]
    many = [config_of(tmp_path, *row) for row in rows]
    alone = [config_of(tmp_path, 1, *who) for who in (("single",), ("expert", "by-hand"), ("model",))]
    (expected,) = launch(validated, 1, (alone,))
    assert expected[2] == pytest.approx(expected[0], rel=3e-5), "layers on the devices of one process"
    assert expected[0][0] != pytest.approx(expected[0][1], rel=3e-4), "other text than that of the step"
    assert expected[0][0] != pytest.approx(expected[0][2], rel=1e-4), "another model after a step"
    by_size = {size: [config for config, row in zip(many, rows, strict=True) if row[0] == size] for size in (2, 4)}
    for size, configs in by_size.items():
        for rank, found in enumerate(launch(validated, size, (configs,), timeout=1800)):
            for config, got in zip(configs, found, strict=True):
                allowed = 1e-2 if config.precision != "fp32" else 3e-5
                wanted = expected[config.strategy_class.model_class is MixtureGPT]
                who = f"{config.strategy} {config.implementation} {config.axes} on rank {rank}"
                assert got == pytest.approx(wanted, rel=allowed), who


def test_every_example_counts_once():
    """Against the mean over all examples at once, worked out here."""
    text = data.validation_text(16)
    inputs, targets = text.batch(torch.arange(13) * text.size // 13)
    torch.manual_seed(0)
    model = GPT(2, 32, 4, 16)
    sharpen(model)
    expected = cross_entropy(model(inputs), targets).item()
    for size in (1, 4):  # on four ranks five each time: the last three examples are rank 2's, and rank 3 has none
        found = launch(seeded, size, (configure(size=size, **SMALL, strategy="ddp"),))
        assert found == pytest.approx([expected] * size, rel=1e-6), f"on {size} rank(s)"


@pytest.mark.parametrize("kind", ["pytorch", "by-hand"])
def test_a_pipelines_last_stage_computes_the_loss_in_float32(kind):
    """Its logits may have 16 bits, of which bfloat16 leaves a loss two or three digits."""
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 16, 256).bfloat16(), torch.randint(256, (2, 16))
    last = SimpleNamespace(evaluate=lambda modules, axis, inputs, loss, *more: loss(logits))
    strategy = SimpleNamespace(
        stages=last, executor=SimpleNamespace(stages=[]), modules=[], pipeline=None, autocast=None
    )
    loss = load("pipeline", kind).evaluate(strategy, None, targets)
    assert (loss.dtype, loss) == (torch.float32, cross_entropy(logits.float(), targets)), "the loss of 16-bit logits"


def seeded(config) -> float:
    validation.EXAMPLES = 13
    torch.manual_seed(0)
    model = config.strategy_class.make_model(config)
    sharpen(model)
    strategy = config.strategy_class(
        model, lambda p: torch.optim.SGD(p, 0.1), config.setup(make_mesh(config.axes, "cpu"))
    )
    modes: set[bool] = set()
    strategy.model.register_forward_pre_hook(lambda module, args: modes.add(module.training))
    loss = validate(strategy, data.validation_text(16), 5)
    assert modes == {False}, "what drops out in training does not in validation"
    assert strategy.model.training, "the model goes on as one that is trained"
    return loss


def short(configs) -> None:
    validation.EXAMPLES = 13
    train(configs)


def test_training_is_the_same_with_and_without(tmp_path, capfd):
    """Every number of every step, and metrics and terminal have the losses where they were asked for."""
    plain = SMALL | {"steps": 5, "checkpoint_every": 0}
    lines = ["--strategy ddp", "--strategy fsdp --by-hand"]
    configs = [
        configure(f"{line} {more}", 2, **plain, run_dir=tmp_path / f"{number}{more[:3]}")
        for number, line in enumerate(lines)
        for more in ("", "--validate-every 2")
    ]
    launch(short, 2, (configs,), timeout=120)
    told = re.findall(r"step (\d)/5  validation loss \d", capfd.readouterr().out)
    assert told == ["2", "4", "5"] * len(lines), "steps in which the validation loss is told, also between --log-every"
    for number, _ in enumerate(lines):
        records = metrics(tmp_path / f"{number}--v")
        assert [record["step"] for record in records if "validation_loss" in record] == [2, 4, 5]
        assert numbers(tmp_path / f"{number}--v") == numbers(tmp_path / f"{number}")
        assert records[4]["validation_loss"] == pytest.approx(records[1]["validation_loss"], rel=0.2)


def test_validation_text_is_not_trained_on(tmp_path):
    trained, held_out = data.training_text(16), data.validation_text(16)
    whole = trained.tokens.numpy().tobytes()
    for begin in range(0, len(held_out.tokens) - 200, len(held_out.tokens) // 20):
        assert held_out.tokens[begin : begin + 200].numpy().tobytes() not in whole
    with pytest.raises(UserError, match="--validate-every.*--task text"):
        configure("--task images --validate-every 5", strategy="single", run_dir=tmp_path / "run")
