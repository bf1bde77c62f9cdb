"""Training in bf16 ends on a plateau twice or three times as high, and every normalization stays at exactly 1.

thread: https://github.com/areal-project/AReaL/issues/1292 https://github.com/vllm-project/speculators/pull/711
        https://github.com/vllm-project/speculators/pull/765 https://github.com/huggingface/accelerate/issues/3979
net:    a list of the data types of parameters and optimizer state, before the first step
cause:  AdamW makes its state in the type of the parameters that it is given, and adds its updates to them. Next to 1
        the numbers of bf16 lie 0.0039 below and 0.0078 above, and an update of 0.0015 is rounded back to 1 every time.
        Smaller weights have finer neighbours, so they learn until the rate has fallen below theirs.
"""

import torch
import torch.distributed as dist

from common.collectives import all_reduce_together
from common.lab.launch import launch
from common.model import GPT, cross_entropy
from course.fsdp.museum import Seen

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.0
STEPS, BATCH, CONTEXT, VOCABULARY, RATE = 20, 4, 8, 32, 1.5e-3


def make_model():
    """The model as an engine hands it to the optimizer."""
    torch.manual_seed(3)
    model = GPT(layers=1, width=64, heads=2, context=CONTEXT, vocabulary=VOCABULARY, tied=False)
    # right: return model
    return model.bfloat16()  # wrong


def batch():
    """Always the same examples, which a model can learn by heart."""
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def train(model, steps, rank=0, size=1):
    """AdamW with a rate that falls to zero along half a cosine. It is the storage that matters here: all is computed
    in float32."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=RATE), Seen()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    inputs, targets = (tensor.chunk(size)[rank] for tensor in batch())
    for step in range(steps):
        optimizer.zero_grad()
        exact = {name: parameter.float() for name, parameter in model.named_parameters()}
        loss = cross_entropy(torch.func.functional_call(model, exact, (inputs,)), targets) / size
        loss.backward()
        total, gradients = loss.detach().clone(), [p.grad for p in model.parameters()]
        if size > 1:
            all_reduce_together([total], dist.group.WORLD)
            all_reduce_together(gradients, dist.group.WORLD)
        seen.numbers[f"loss {step}"] = total
        seen.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        optimizer.step()
        schedule.step()
    seen.copies = {name: p.detach() for name, p in model.named_parameters()}
    gains = [p.detach().float() for name, p in model.named_parameters() if "norm" in name and name.endswith("weight")]
    seen.numbers["gains"] = torch.cat(gains)  # the factors of the normalizations, which begin as 1
    state = [(key, value) for of_one in optimizer.state.values() for key, value in of_one.items() if value.dim()]
    seen.types = sorted({f"{key} {value.dtype}".replace("torch.", "") for key, value in state})
    return seen


def on_rank(steps=STEPS):
    return train(make_model(), steps, dist.get_rank(), dist.get_world_size())


def alone(steps=STEPS):
    """One process, in float32, whatever the ranks' model is."""
    torch.manual_seed(3)
    return train(GPT(layers=1, width=64, heads=2, context=CONTEXT, vocabulary=VOCABULARY, tied=False), steps)


def plateau(steps=200):
    """The loss after every forty steps."""
    numbers = launch(lambda: on_rank(steps), RANKS)[0].numbers
    return [(step + 1, numbers[f"loss {step}"].item()) for step in range(39, steps, 40)]


def types():
    """What the optimizer keeps, and in which data type."""
    return launch(lambda: on_rank(1).types, RANKS)[0]


def gaps():
    """How far the numbers next to 1 are from it in bf16: below, above."""
    eps = torch.finfo(torch.bfloat16).eps
    return eps / 2, eps


def effect(*_):
    """The share of all factors of normalizations that are exactly 1 after the last step."""
    return (launch(on_rank, RANKS)[0].numbers["gains"] == 1).float().mean().item()
