"""Pretended ranks in one process: the numbers of real ones, bit for bit, and one line where they cannot be."""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.lab.launch import launch
from common.mesh import axis, make_mesh

TIMES = 100  # of 200 meshes, some 8 have the memory of one that is gone


def own(shape=(8, 3)) -> torch.Tensor:
    torch.manual_seed(dist.get_rank() + 1)
    return 1e3 * torch.randn(shape)


def all_that_the_course_calls() -> dict[str, torch.Tensor]:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it would rather have one message than two
    size, found = dist.get_world_size(), {}

    def note(name, tensor, call, *arguments, **named):
        call(tensor, *arguments, **named)
        found[name] = tensor

    for dtype in (torch.float32, torch.bfloat16):
        note(f"sum of {dtype}", own((1001,)).to(dtype), dist.all_reduce)
    note("reduce-scatter", torch.empty(8 // size, 3), dist.reduce_scatter_single, own())
    note("all-gather", torch.empty(8 * size, 3), dist.all_gather_single, own())
    note("all-to-all", torch.empty(8, 3), dist.all_to_all_single, own())
    note("broadcast", own(), dist.broadcast, src=1)
    gathered = [torch.empty(8, 3) for _ in range(size)]
    dist.all_gather(gathered, own())
    found["list"] = torch.stack(gathered)
    found["drawn"] = torch.stack([own((2, 2)) + 1, nn.Linear(2, 2).weight.detach()])

    mesh = make_mesh({"data": 2, "tensor": -1})
    for names in (("data",), ("tensor",), ("data", "tensor")):
        along = axis(mesh, *names)
        note(
            f"sum along {names}",
            own() * (along.rank + 1) + dist.get_rank(along.group),
            dist.all_reduce,
            group=along.group,
        )
    note("root of a group", own(), dist.broadcast, group=axis(mesh, "data").group, group_src=1)

    arrived = torch.empty(8, 3)
    right, left = (dist.get_rank() + 1) % size, (dist.get_rank() - 1) % size
    pair = [dist.P2POp(dist.irecv, arrived, left), dist.P2POp(dist.isend, own(), right)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    found["message"] = arrived
    tags, several = (0, 1, 0, 1), [torch.empty(8, 3) for _ in range(4)]
    works = [dist.isend(own() + number, right, tag=tag) for number, tag in enumerate(tags)]
    for work in [*works, *(dist.irecv(into, left, tag=tag) for into, tag in zip(several, reversed(tags), strict=True))]:
        work.wait()
    found["messages"] = torch.stack(several)  # of one tag in the order in which they were sent

    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 16), torch.randn(4, 8)
    weight = distribute_tensor(weight, mesh, [Shard(0), Shard(1)]).requires_grad_()
    outputs = distribute_tensor(inputs, mesh, [Replicate(), Replicate()]) @ weight
    loss = (outputs**2).sum()
    loss.backward()
    return found | {"loss": loss.full_tensor(), "gradient": weight.grad.to_local(), "whole": weight.grad.full_tensor()}


@pytest.mark.parametrize("size", [2, 4])
def test_pretended_ranks_have_the_bits_of_real_ones(size):
    state = torch.get_rng_state()
    pretended = launch(all_that_the_course_calls, size, how="local")
    real = launch(all_that_the_course_calls, size)  # after it: what DTensor has kept of pretended ranks would show
    assert len(pretended) == size and torch.equal(torch.get_rng_state(), state) and not dist.is_initialized()
    assert all(pretended[rank].keys() == real[rank].keys() for rank in range(size))
    different = {
        (rank, name): (pretended[rank][name], value)
        for rank in range(size)
        for name, value in real[rank].items()
        if not torch.equal(pretended[rank][name], value)
    }
    assert not different
    assert not torch.equal(real[0]["message"], real[1]["message"]), "ranks have something of their own"


REDUCTIONS = {"SUM": torch.sum, "AVG": torch.mean, "PRODUCT": torch.prod, "MAX": torch.amax, "MIN": torch.amin}


def every_reduction() -> dict[tuple, torch.Tensor]:
    mesh, found = make_mesh({"pipeline": 2, "data": 2, "tensor": 2}), {}
    for how, names in itertools.product(REDUCTIONS, (("pipeline",), ("data",), ("tensor",), ("data", "tensor"))):
        found[how, names] = 1.0 + torch.arange(3) + dist.get_rank()
        dist.all_reduce(found[how, names], getattr(dist.ReduceOp, how), axis(mesh, *names).group)
    return found


def test_every_reduction_is_over_the_ranks_of_its_group():
    """gloo has no average; and of eight ranks the groups along one axis are not neighbours."""
    grid = torch.arange(8).reshape(2, 2, 2)
    for rank, found in enumerate(launch(every_reduction, 8, how="local")):
        place = dict(zip(("pipeline", "data", "tensor"), (grid == rank).nonzero()[0].tolist(), strict=True))
        for (how, names), values in found.items():
            members = grid[tuple(slice(None) if name in names else at for name, at in place.items())].flatten()
            expected = REDUCTIONS[how](1.0 + torch.arange(3) + members[:, None], 0)
            torch.testing.assert_close(values, expected, msg=f"{how} over {names} on rank {rank}")


def places_on_axes() -> list[torch.Tensor]:
    mesh, found = make_mesh({"data": 2, "tensor": -1}), []
    for name in ("data", "tensor") * TIMES:  # mesh[name] is gone afterwards; now and then the next one has its memory
        found.append(torch.zeros(1, dtype=torch.int64) + mesh[name].get_local_rank())
    return found


def test_a_meshs_coordinates_are_not_those_of_one_that_is_gone():
    ranks = launch(places_on_axes, 2, how="local")
    assert [[int(place) for place in found] for found in ranks] == [[0, 0] * TIMES, [1, 0] * TIMES]


def ring() -> torch.Tensor:
    """The ring of chapter 01, with narrow in place of a list's index, which only a plain number can be."""
    size, rank = dist.get_world_size(), dist.get_rank()
    chunks = torch.arange(size) + rank
    arrived = torch.empty(1, dtype=chunks.dtype)
    for step in range(2 * (size - 1)):
        outgoing, incoming = (chunks.narrow(0, (rank - step - later) % size, 1) for later in (0, 1))
        send = dist.isend(outgoing, (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        send.wait()
        incoming.copy_(incoming + arrived if step < size - 1 else arrived)
    return chunks


def test_a_ring_of_many_and_a_sum_over_a_thousand():
    expected = 16 * torch.arange(16) + sum(range(16))
    assert all(torch.equal(chunks, expected) for chunks in launch(ring, 16, how="local"))

    def add():
        numbers = torch.arange(1024) * dist.get_rank()
        dist.all_reduce(numbers)
        return numbers

    found = launch(add, 1024, how="local")
    assert len(found) == 1024 and all(torch.equal(numbers, torch.arange(1024) * 523776) for numbers in found)


@pytest.mark.parametrize(
    "what, says",
    [
        (lambda: 1 if dist.get_rank() == 0 else 2, "Python"),
        (lambda: 1 if make_mesh({"data": -1}).get_rank() > 1 else 2, "Python"),
        (lambda: [5, 6, 7, 8][dist.get_rank()], "index"),
        (lambda: [*range(dist.get_rank())], "index"),
        (lambda: DistributedDataParallel(module=nn.Linear(2, 2)), "DistributedDataParallel"),
        (lambda: fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (4,))), "fully_shard"),
        (lambda: dist.recv(torch.empty(1), (dist.get_rank() + 1) % 4), "sent"),
        (lambda: dist.reduce(torch.ones(1), 0), "reduce"),
    ],
)
def test_what_pretended_ranks_cannot_do_is_refused_in_one_line(what, says):
    with pytest.raises(UserError) as refused:
        launch(what, 4, how="local")
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert not dist.is_initialized()
