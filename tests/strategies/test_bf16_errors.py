"""bf16 with every strategy by hand, on 2, 4 and 8 ranks: its gradients and loss are hardly further from those in
float64 than one process's in bf16 are. `pytest -rP` shows the table.

Attention over several ranks is measured by itself, too: in a whole model the rounding of linear layers hides its.
"""

import pytest
import torch
import torch.distributed as dist
from helpers import FULL
from torch.nn import functional as F

from common.lab.launch import launch
from common.mesh import in_order, make_mesh, resolve
from common.model import GPT, Block, cross_entropy
from common.strategy import Setup
from course.model_parallel import by_hand_ring_attention as ring
from course.model_parallel import by_hand_ulysses as ulysses
from course.model_parallel.moe_model import MixtureGPT
from course.strategies import STRATEGIES, load

ALLOWED = 1.5  # times the error of one process in bf16
SIZES = (2, 4, 8) if FULL else (4,)
LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, EXAMPLES = 6, 32, 8, 32, 64, 16

# All that is by hand, beside threads, and pipelines with PyTorch's schedules, whose stages are ours. "model" is the
# last: it makes groups that are on some ranks only, and PyTorch's names of later ones count those.
WHO = [(name, "by-hand") for name, entry in STRATEGIES.items() if "by-hand" in entry.places and name != "dp"]
WHO = sorted([*WHO, ("pipeline", "pytorch"), ("pipeline+ddp", "pytorch")], key=lambda who: who[0] == "model")
SIXTEEN = {"zero1", "zero2", "fsdp", "hsdp"}  # compute with 16-bit copies of all parameters, and autocast with float32
AXES = {"mesh": {"tensor": 2, "pipeline": -1}}  # where the preset is not meant


def make_model(model_class):
    """With weights that are large enough for gradients to be far from zero, and alike on all ranks."""
    torch.manual_seed(0)
    model = model_class(LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model


def batch():
    tokens = torch.randint(VOCABULARY, (EXAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def alone(model_class, dtype, autocast=False):
    """Each example's loss and all gradients, on one process, with parameters of this type."""
    model, (inputs, targets) = make_model(model_class).to(dtype), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(inputs)
    logits = logits.to(torch.float64 if dtype == torch.float64 else torch.float32)
    loss = cross_entropy(logits, targets)
    (loss + (model.auxiliary_loss() if model_class is MixtureGPT else 0)).backward()
    of_examples = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    of_examples = of_examples.unflatten(0, targets.shape).mean(1).detach().double()
    return of_examples, {name: p.grad.double() for name, p in model.named_parameters()}


def by_strategies():
    """(strategy, implementation) -> loss and, on rank 0, all gradients of a step in bf16: after the first one, momentum
    is the gradient itself; and the types in which blocks add to what passes by."""
    size, found = dist.get_world_size(), {}
    for name, kind in WHO:
        cls = load(name, kind)
        options = cls.Options(microbatches=EXAMPLES // 2) if hasattr(cls.Options, "microbatches") else cls.Options()
        mesh = make_mesh(in_order(resolve(AXES.get(name, cls.preset), size)))
        strategy = cls(make_model(cls.model_class), momentum, Setup(mesh, options, "bf16", 1e9))
        inputs, targets = (tensor.chunk(strategy.data_size)[strategy.data_rank] for tensor in batch())
        types: set[torch.dtype] = set()
        for block in (module for module in strategy.model.modules() if isinstance(module, Block)):
            block.register_forward_hook(lambda block, args, x, types=types: types.update((args[0].dtype, x.dtype)))
        loss, _ = strategy.step([(inputs, targets)])
        state = strategy.full_state()
        kept = state["optimizer"]["state"].items() if state else ()
        found[name, kind] = loss.item(), {key: value["momentum_buffer"].double() for key, value in kept}, types
    return found


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def relative(found: dict, true: dict) -> float:
    """The length of all errors together, as a share of the length of what is true."""
    square = sum((found[name] - value).square().sum() for name, value in true.items())
    return (square / sum(value.square().sum() for value in true.values())).sqrt().item()


@pytest.fixture(scope="module")
def one_process():
    """By model, and whether its parameters have 16 bits: loss and gradients in float64, and how far one process in bf16
    is from them. The errors of single examples' losses happen to cancel in their mean or not; what they are without
    that is their root mean square."""

    def both(model_class, sixteen):
        losses, true = alone(model_class, torch.float64)
        rounded, found = alone(model_class, torch.bfloat16 if sixteen else torch.float32, autocast=True)
        return losses.mean(), true, (rounded - losses).square().mean().sqrt().item(), relative(found, true)

    cases = [(GPT, False), (GPT, True), (MixtureGPT, False)]
    return {case: launch(both, 1, case)[0] for case in cases}


def test_a_step_is_as_exact_as_that_of_one_process(one_process):
    print(f"{'errors in bf16, over those of one process':44}gradient   loss")
    too_far = {}
    for nproc in SIZES:
        ranks = launch(by_strategies, nproc, timeout=300)
        for who, (found, gradients, _) in ranks[0].items():
            loss, true, loss_error, error = one_process[load(*who).model_class, who[0] in SIXTEEN]
            times = relative(gradients, true) / error, abs(found - loss).item() / loss_error
            print(f"{nproc} ranks, {' '.join(who):33}{times[0]:8.2f} {times[1]:8.2f}")
            if not (0.3 < times[0] < ALLOWED and times[1] < ALLOWED):
                too_far[nproc, who] = times
            types = set().union(*(rank[who][2] for rank in ranks))
            assert types == {torch.bfloat16 if who[0] in SIXTEEN else torch.float32}, f"{who}: in and out of blocks"
    assert not too_far


def examples(scale):
    """q, k, v and a gradient of the output, in bf16, of 512 tokens."""
    torch.manual_seed(2)
    q, k, v, grad = torch.randn(4, 1, 8, 512, 64).unbind()
    return [x.bfloat16() for x in (scale * q, k, v, grad)]


def attended(how, inputs):
    """The output and the gradients of q, k and v; `how` is a function of q, k and v."""
    *inputs, grad = inputs
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = how(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION = [  # the last without kernels; queries times 1, and times 5, by which a few keys have most of the weight
    (how, kernels, scale)
    for how, kernels in ((ring.ring_attention, True), (ulysses.ulysses_attention, True), (ring.ring_attention, False))
    for scale in (1, 5)
]


def attention_on(nproc):
    """Ulysses needs a head for each rank, of which `examples` have 8; without kernels nothing is summed otherwise."""
    return [case for case in ATTENTION if nproc <= 8 or case[:2] == (ring.ring_attention, True)]


def over_ranks():
    found = []
    for how, kernels, scale in attention_on(dist.get_world_size()):
        if not kernels:
            ring.flash_kernels = lambda q: None  # this process ends with the test
        order = ulysses.contiguous if how is ulysses.ulysses_attention else ring.zigzag
        where = ring.positions(dist.get_rank(), dist.get_world_size(), 512, order)
        own = [x[:, :, where] for x in examples(scale)]
        on_group = lambda *qkv, how=how, order=order: how(*qkv, dist.group.WORLD, True, order)  # noqa: E731
        found.append((where, attended(on_group, own)))
    return found


def errors(true, found):
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(found, true, strict=True)])


@pytest.mark.parametrize("nproc", [*SIZES, 32])
def test_attention_over_ranks_is_as_exact_as_that_of_one_process(nproc):
    """On 32 ranks, since it takes many for a sum that is rounded on each of them to be twice as far off."""
    ranks = launch(over_ranks, nproc, timeout=300)
    for number, (how, kernels, scale) in enumerate(attention_on(nproc)):
        true = attended(plain, [x.double() for x in examples(scale)])
        alone = errors(true, attended(plain, examples(scale)))
        whole = [torch.empty_like(x) for x in examples(scale)]
        for where, parts in (found[number] for found in ranks):
            for tensor, part in zip(whole, parts, strict=True):
                tensor[:, :, where] = part
        times = errors(true, whole) / alone
        numbers = "  ".join(f"{name} {x:.2f}" for name, x in zip(("out", "dQ", "dK", "dV"), times, strict=True))
        print(f"{how.__name__}, queries times {scale}, {nproc} ranks, times the error of one process's: {numbers}")
        assert (times < ALLOWED).all(), (how.__name__, kernels, scale, times)


def test_the_kernels_of_gpus_take_what_they_are_given():
    """Without a GPU: shapes alone. Its forward pass gives the log-sum-exp that its backward pass wants."""
    q = torch.empty(1, 2, 16, 8, dtype=torch.bfloat16, device="meta")
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)
    assert lse.shape == (1, 2, 16) and lse.dtype == torch.float32
    assert [x.shape for x in ring.flash_backward_on_gpu(q, q, q, q, out, lse, 0.0, True)] == [q.shape] * 3
