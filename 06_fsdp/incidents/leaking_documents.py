"""Packed documents see each other under context parallelism, and the loss is higher than on one GPU.

thread: https://github.com/huggingface/trl/pull/6843 https://github.com/axolotl-ai-cloud/axolotl/issues/3608
net:    equality with one process, in the first step; one probe that changes a token
cause:  Packing keeps documents apart by a mask of blocks on the diagonal. The attention of context parallelism has a
        causal mask of its own and drops the one that it is given, so a document sees everything before it. Nothing is
        missing and no shape is wrong; there is only more to see.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from common.collectives import all_reduce_together
from common.lab.launch import launch
from common.mesh import axis, make_mesh
from common.model import GPT, cross_entropy
from course.fsdp.museum import Seen
from course.model_parallel.by_hand_ring_attention import apply_context_parallel, contiguous, local_tokens
from course.model_parallel.by_hand_tensor import all_gather_sequence

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.5
STEPS, DOCUMENT, VOCABULARY = 3, 16, 32
NUMBER = torch.arange(2).repeat_interleave(DOCUMENT)  # which document each position belongs to


def attention(q, k, v, group, causal, order):
    """Attention of this rank's queries [batch, heads, time / ranks, d] over the keys and values of all ranks."""
    rows = q.shape[2]
    k, v = (whole(tensor, group) for tensor in (k, v))
    mine, all_of_them = torch.arange(rows) + dist.get_rank(group) * rows, torch.arange(k.shape[2])
    seen = mine[:, None] >= all_of_them
    # right: seen = seen & (NUMBER[mine][:, None] == NUMBER)
    seen = seen.clone()  # wrong
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def whole(tensor, group):
    """[batch, heads, time / ranks, d] of each rank -> [batch, heads, time, d]."""
    together = all_gather_sequence(tensor.transpose(1, 2).flatten(2), group)
    return together.unflatten(2, tensor.shape[1::2]).transpose(1, 2)


def make_model():
    """Positions begin anew with each document, whether it is packed or not."""
    torch.manual_seed(3)
    model = GPT(layers=2, width=16, heads=2, context=DOCUMENT, vocabulary=VOCABULARY, tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)  # a model that has learned something looks at what stands before
    return model


def documents(step):
    """Two of them, [2, DOCUMENT], and their targets."""
    tokens = torch.randint(VOCABULARY, (2, DOCUMENT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def parallel_model():
    model, place = make_model(), axis(make_mesh({"context": -1}), "context")
    apply_context_parallel(model, place, attention, contiguous)
    model.embedding.positions.register_forward_pre_hook(lambda _module, args: args[0] % DOCUMENT)
    return model, place


def on_rank():
    model, place = parallel_model()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), Seen()
    for step in range(STEPS):
        inputs, targets = (local_tokens(part.reshape(1, -1), place, contiguous) for part in documents(step))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets) / place.size
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        all_reduce_together([p.grad for p in model.parameters()], place.group)
        optimizer.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        seen.numbers |= {f"loss {step}": total, f"norm {step}": norm}
        seen.norms.append(norm.item())
    seen.copies = {name: p.detach() for name, p in model.named_parameters()}
    seen.numbers |= seen.copies
    return seen


def alone():
    """One process, in which each document is a sequence of its own, so that none can see another."""
    model, seen = make_model(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = documents(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        seen.numbers |= {f"loss {step}": loss.detach(), f"norm {step}": norm}
        optimizer.step()
    seen.numbers |= {name: p.detach() for name, p in model.named_parameters()}
    return seen


def outputs(first_token=None, packed=True):
    """The logits [2 * DOCUMENT, vocabulary] of all ranks, with another first token of the first document if one is
    given; unpacked, each document is a sequence of its own, on one process."""

    def run():
        inputs = documents(0)[0].clone()
        if first_token is not None:
            inputs[0, 0] = first_token
        with torch.no_grad():
            if not packed:
                return make_model()(inputs).flatten(0, 1)
            model, place = parallel_model()
            return model(local_tokens(inputs.reshape(1, -1), place, contiguous))[0]

    return torch.cat(launch(run, RANKS if packed else 1))


def changed(packed=True):
    """For each position: does its output change with the first token of the first document?"""
    token = (int(documents(0)[0][0, 0]) + 1) % VOCABULARY
    return (outputs(packed=packed) != outputs(token, packed)).any(dim=-1)


def effect(*_):
    """The share of all positions whose output depends on the first document's first token."""
    return changed().float().mean().item()
