"""Every strategy on one rank. In fp16 gradients are scaled and unscaled again, clipped by their own norm, and a step
that overflows is skipped; by SGD, whose steps are as long as its gradients. And what a step and an evaluation leave as
it was."""

import itertools

import pytest
import torch
from torch.nn import functional

from common.lab import equality
from common.lab.launch import launch
from common.mesh import make_mesh
from common.state import local_of
from common.strategy import Setup
from course.fsdp.hsdp import SyncOnce
from course.strategies import STRATEGIES, load

KINDS = [(name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations]
OTHERS = {("fsdp", "gradients sent once"): SyncOnce}  # in no line of the table
KINDS += list(OTHERS)
MAX_NORM = 0.3  # each step is clipped


def taken(name: str, kind: str, precision: str) -> dict:
    """On one rank: loss, the types in which it is computed, norm, and how the weights have moved, of a step; of one
    whose gradients overflow, the same, and what the loss scale is multiplied by."""
    torch.manual_seed(0)
    cls = OTHERS.get((name, kind)) or load(name, kind)
    mesh = make_mesh(dict.fromkeys(cls.preset, 1), "cpu")
    model = equality.tied(cls.model_class)
    before = {part: value.clone() for part, value in model.state_dict().items()}
    strategy = cls(model, equality.sgd, Setup(mesh, cls.Options(), precision, MAX_NORM))
    tokens = torch.arange(8 * equality.CONTEXT).view(8, -1) * 7 % equality.VOCABULARY
    batch = [(tokens[:4], tokens[:4].roll(-1, 1)), (tokens[4:], tokens[4:].roll(-1, 1))]
    compute, types = functional.cross_entropy, set()

    def noting(*args, **more):
        loss = compute(*args, **more)
        types.add(loss.dtype)
        return loss

    functional.cross_entropy = noting
    loss, norm = (float(number) for number in strategy.step(batch))
    functional.cross_entropy = compute
    after = {part: value.clone() for part, value in strategy.full_state()["model"].items()}
    moved = torch.cat([(after[part] - before[part]).flatten() for part in before])
    found = {"loss": loss, "norm": norm, "moved": moved, "types": types}
    if precision == "fp16":
        strategy.scaler.update(2.0**126)
        strategy.step(batch)
        now = strategy.full_state()["model"]
        found["still"] = all(torch.equal(now[part], after[part]) for part in now)
        found["scale"] = strategy.scaler.get_scale() / 2.0**126
    return found


def everything(strategy) -> dict:
    """What training goes on from: its state, the scale of its losses, gradients, random numbers, and its mode."""
    found = equality.flatten(strategy.full_state())
    found |= {f"gradient {n}": p.grad for n, p in strategy.model.named_parameters() if p.grad is not None}
    found["random"], found["scale"] = torch.get_rng_state(), torch.tensor(strategy.scaler.get_scale())
    found["mode"] = torch.tensor([module.training for module in strategy.model.modules()])
    return {name: local_of(tensor.detach()).clone() for name, tensor in found.items()}


def changed(before: dict, after: dict) -> list[str]:
    return [name for name in before | after if name not in after or not torch.equal(before[name], after.get(name))]


def left(name: str, kind: str) -> tuple[dict, str]:
    """On one rank: what each of these changes that it should not; and what is said of a layer that nobody uses."""
    cls, found = OTHERS.get((name, kind)) or load(name, kind), {}
    mesh = make_mesh(dict.fromkeys(cls.preset, 1), "cpu")
    tokens = torch.arange(8 * equality.CONTEXT).view(8, -1) * 5 % equality.VOCABULARY
    batches = [(part, part.roll(-1, 1)) for part in tokens.split(4)]
    kept = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
    strategy = cls(equality.frozen(cls.model_class), equality.adamw, Setup(mesh, cls.Options()))
    told = strategy.step(batches)
    numbers = [number.item() for number in told]
    strategy.set_learning_rate(0.0)
    before = strategy.full_state()["model"]
    before = {part: value.clone() for part, value in before.items()}
    strategy.step(batches[:1])
    found["a step at rate 0"] = changed(before, strategy.full_state()["model"])
    found["a step, of what another has told"] = [number for number in told if number.item() not in numbers]
    before = everything(strategy)
    strategy.evaluate(*batches[1])
    found["an evaluation"] = changed(before, everything(strategy))
    pairs = zip(itertools.chain(*batches), itertools.chain(*kept), strict=True)
    found["a step, of its batch"] = [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]
    model = equality.tied(cls.model_class)
    model.embedding.extra = torch.nn.Linear(2, 2)
    try:
        strategy = cls(model, equality.adamw, Setup(mesh, cls.Options()))
        before = {part: value.clone() for part, value in strategy.full_state()["model"].items()}
        strategy.step(batches)
        after = strategy.full_state()["model"]
        moves = {part for part in before if not torch.equal(before[part], after[part])}
        said = "left alone" if before.keys() - moves == {"embedding.extra.weight", "embedding.extra.bias"} else ""
    except Exception as refusal:
        said = f"{type(refusal).__name__}: {refusal}"
    return found, said


def all_of_them() -> dict:
    found = {(*who, "fp16"): None for who in KINDS}
    found |= {("single", "pytorch", "fp32"): None, ("expert", "by-hand", "fp32"): None}
    for who in found:
        try:
            found[who] = taken(*who)
        except Exception as error:
            found[who] = f"{type(error).__name__}: {error}"
    for who in KINDS:
        found[who] = left(*who)
    return found


@pytest.fixture(scope="module")
def found():
    return launch(all_of_them, 1, timeout=120)[0]


@pytest.mark.parametrize("name, kind", KINDS)
def test_a_step_in_fp16_is_that_of_float32(name, kind, found):
    same = ("expert", "by-hand") if name == "expert" else ("single", "pytorch")
    got, like = found[name, kind, "fp16"], found[(*same, "fp32")]
    assert isinstance(got, dict), got
    assert got["types"] <= {torch.float32}, "the type in which losses are computed, of 16-bit logits too"
    assert got["loss"] == pytest.approx(like["loss"], rel=0.02), "the loss that is told is not scaled"
    assert got["norm"] == pytest.approx(like["norm"], rel=0.05), "the norm of gradients without their scale"
    length, expected = got["moved"].norm().item(), like["moved"].norm().item()
    assert length == pytest.approx(expected, rel=0.05), "how far the weights move: clipped, and not scaled"
    assert torch.dot(got["moved"], like["moved"]).item() > 0.95 * length * expected, "where the weights move to"


@pytest.mark.parametrize("name, kind", KINDS)
def test_a_step_that_overflows_is_skipped_and_the_scale_is_halved(name, kind, found):
    got = found[name, kind, "fp16"]
    assert isinstance(got, dict), got
    assert got["still"], "gradients that overflowed have changed the weights"
    assert got["scale"] == 0.5, "the loss scale, times what it was, after an overflow"


@pytest.mark.parametrize("name, kind", KINDS)
def test_a_step_and_an_evaluation_change_nothing_else(name, kind, found):
    changes, _ = found[name, kind]
    assert changes == dict.fromkeys(changes, []), "what each has changed"


# In these nobody waits for a gradient. (DDP in a pipeline of PyTorch's stops by an error of its own.)
NOBODY_WAITS = {"single", "dp", "model", "pipeline", "pipeline+ddp", "pipeline+fsdp"}


@pytest.mark.parametrize("name, kind", [who for who in KINDS if who != ("pipeline+ddp", "pytorch")])
def test_a_parameter_that_nobody_uses_is_named_or_left_alone_as_by_one_process(name, kind, found):
    """Zeros in the place of a gradient would not do: weight decay would move it."""
    _, said = found[name, kind]
    if name in NOBODY_WAITS:
        assert said == "left alone", said
    else:
        assert said.startswith("UserError") and "embedding.extra.weight and 1 more" in said, said
