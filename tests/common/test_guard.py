"""The guard catches each mistake that gloo passes over in silence, and leaves correct programs alone."""

import contextlib
import itertools
import re
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from operators import every_operator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from common.lab import guard
from common.lab.guard import CheckCollectives, CollectiveMismatch
from common.lab.launch import launch
from common.lab.ledger import Ledger

F = torch.ops._c10d_functional
MAX = dist.ReduceOp.MAX


# The mistakes, made by one of two ranks.


def other_shape(rank):
    x = torch.arange(6.0).reshape((2, 3) if rank == 0 else (3, 2))
    dist.all_reduce(x)


def other_order(rank):
    a, b = torch.tensor([rank + 1.0]), torch.tensor([10 * (rank + 1.0)])
    if rank == 0:
        dist.all_reduce(a)
        dist.all_reduce(b)
    else:
        dist.all_reduce(b)
        dist.all_reduce(a)


def other_splits(rank):
    send, receive = ([1, 1], [1, 2]) if rank == 0 else ([1, 1], [1, 1])
    dist.all_to_all_single(torch.empty(sum(receive), 3), torch.ones(2, 3), receive, send)


def other_lists(rank):
    receive, send = ([1, 4], [1, 2]) if rank == 0 else ([2, 5], [3, 5])
    dist.all_to_all([torch.empty(n) for n in receive], [torch.ones(n) for n in send])


def other_even_splits(rank):
    dist.all_to_all_single(torch.empty(4 + 2 * rank, 3), torch.ones(4 + 2 * rank, 3))


def functional_other_splits(rank):
    receive, send = ([2, 1], [2, 3]) if rank == 0 else ([4, 1], [1, 1])
    F.all_to_all_single(torch.ones(sum(send)), receive, send, dist.group.WORLD.group_name)


def one_leaves(rank):
    group = dist.new_group([0, 1])
    for _ in range(2 - rank):
        dist.barrier(group)


def one_raises(rank):
    if rank == 1:
        raise ValueError("bad batch")
    dist.barrier()


def unequal_batches(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False), init_sync=False)
    for _ in range(2 - rank):
        model(torch.ones(1, 4)).sum().backward()


def unequal_models(rank):
    DistributedDataParallel(torch.nn.Linear(4 + rank, 1, bias=False))


def under_guard(mistakes):
    """What each mistake raises on this rank; line numbers are counted from the mistake's first line."""
    texts = []
    for mistake in mistakes:
        try:
            with CheckCollectives():
                mistake(dist.get_rank())
            texts.append("nothing raised")
        except Exception as error:
            first = mistake.__code__.co_firstlineno
            text = re.sub(r"test_guard.py:(\d+)", lambda at, first=first: f"+{int(at[1]) - first}", str(error))
            texts.append(f"{type(error).__name__}: {text}")
    return texts


# Of each mistake: what both ranks are told that rank 0 and rank 1 have called.
CAUGHT = {
    other_shape: ("all_reduce float32 [2, 3] SUM +2", "all_reduce float32 [3, 2] SUM +2"),
    other_order: ("+3", "+6"),
    other_splits: ("[1, 3], [2, 3]", "[1, 3], [1, 3]"),
    other_lists: ("sends [1], [2] receives [1], [4]", "sends [3], [5] receives [2], [5]"),
    other_even_splits: ("sends [2, 3], [2, 3] receives", "sends [3, 3], [3, 3] receives"),
    functional_other_splits: ("sends [2], [3] receives [2], [1]", "sends [1], [1] receives [4], [1]"),
}
# The same where rank 1 goes its own way: what rank 0 is told of it, what rank 1 raises.
LEFT_ALONE = {
    one_leaves: ("rank 1 calls nothing more", "nothing raised"),
    one_raises: ("ValueError: bad batch", "ValueError: bad batch"),
    unequal_batches: ("rank 1 calls nothing more", "nothing raised"),
    unequal_models: ("RuntimeError: [1]: params[0]", "RuntimeError: [1]: params[0]"),
}


def test_each_mistake_is_caught_before_it_starts():
    mistakes = [*CAUGHT, *LEFT_ALONE]
    texts = dict(zip(mistakes, zip(*launch(under_guard, 2, (mistakes,), timeout=100), strict=True), strict=True))
    for mistake, expected in CAUGHT.items():
        first, second = texts[mistake]
        assert first == second and first.startswith("CollectiveMismatch: collective "), mistake.__name__
        for said, words in zip(first.split("; "), expected, strict=True):
            assert all(word in said for word in words.split())
        assert "rank 0 " in first.split("; ")[0] and first.split("; ")[1].startswith("rank 1 ")
    for mistake, (first, second) in LEFT_ALONE.items():
        assert texts[mistake][0].startswith("CollectiveMismatch: collective ") and first in texts[mistake][0]
        assert texts[mistake][1].startswith(second)


WAYS = {"numbers": 7, "more": 3, "dtype": torch.float64, "source": 0, "how": "max"}  # in which rank 1's call is another


def every_operator_in_other_ways() -> dict[tuple, str]:
    """What the guard says where one rank makes another call than the other: of each operator, each way; and of each
    collective, another collective."""
    rank, said, calls = dist.get_rank(), {}, every_operator()
    others = (
        {way: every_operator(**{way: value}) for way, value in WAYS.items()} if rank else dict.fromkeys(WAYS, calls)
    )
    names = [key for key in calls if "barrier" not in key[1] and not re.search("send|recv|p2p", key[1])]
    turned = names[5:] + names[:5] if rank else names
    others["operator"] = dict(zip(names, map(calls.get, turned), strict=True))
    for way, table in others.items():
        for name in names:
            try:
                with CheckCollectives():
                    table[name]()
                said[way, name] = ""
            except CollectiveMismatch as error:
                said[way, name] = str(error)
            except RuntimeError as error:  # PyTorch itself refuses it on this rank, before anything is called
                said[way, name] = f"refused: {error}"
    return said


def test_whatever_two_ranks_do_not_do_alike_is_caught():
    one, other = launch(every_operator_in_other_ways, 2, timeout=100)
    for (way, key), text in one.items():
        told, reduces = other[way, key], "reduce" in key[1]
        rooted = re.match("broadcast|reduce_$|scatter_|gather_", key[1])
        several = "coalesced" in key[1]
        applies = {"how": reduces, "source": rooted, "more": several}
        if applies.get(way, True):
            assert text == told and text.startswith("collective "), f"{key}, {way}: {text or 'not noticed'}"
        else:
            assert text == told == "", f"{key}: the same call on both ranks"


def patience_ends_when_they_wait(store, ranks):
    """From here on the guard's clock stands still on this rank until each of `ranks` has written down what it is about
    to call: then its time is up."""
    post, ticks = CheckCollectives._post, itertools.count()

    def noted(guard, group, number, rank, call):
        post(guard, group, number, rank, call)
        store.set(f"{rank} waits", "")

    def monotonic():
        return 10.0 * next(ticks) if store.check([f"{rank} waits" for rank in ranks]) else 0.0

    CheckCollectives._post = noted
    guard.time = SimpleNamespace(sleep=time.sleep, monotonic=monotonic)


def subgroups_and_latecomers():
    rank, store, texts = dist.get_rank(), dist.distributed_c10d._get_default_store(), []
    group = dist.new_group([0, 2, 3])
    try:
        with CheckCollectives():
            dist.barrier()
            if rank != 1:
                for size in (1, 1 + rank // 2):
                    dist.all_reduce(torch.ones(size), group=group)
    except CollectiveMismatch as error:
        texts.append(str(error))
    try:
        with CheckCollectives(timeout=3):
            dist.barrier()
            if rank == 2:
                store.wait([f"gave up {other}" for other in (0, 1, 3)])
            else:
                patience_ends_when_they_wait(store, (0, 1, 3))
            dist.barrier()
    except CollectiveMismatch as error:
        texts.append(str(error))
        store.set(f"gave up {rank}", "")
    return texts


def test_subgroups_and_a_rank_that_never_comes():
    """Ranks 0, 2 and 3 are told that one of them sends another size, those that waited for rank 2 that it did not come,
    and rank 2 that it came too late."""
    texts = launch(subgroups_and_latecomers, 4, timeout=100)
    differ, waited, late = texts[0][0], texts[0][1], texts[2][1]
    assert texts == [[differ, waited], [waited], [differ, late], [differ, waited]]
    assert "collective 2 of group 1" in differ and "rank 0 calls" in differ and "ranks 2-3 call" in differ
    assert "ranks 0-1, 3 call barrier" in waited and "rank 2 calls nothing" in waited
    assert "ranks 0-3 call barrier" in late


def correct_program():
    """Everything that a guard could mistake for a mistake; returns all that was computed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x, got = torch.randn(6), {}
    if rank == 0:  # rooted operations and barriers are often written twice, once for the root
        dist.broadcast(x, 0)
        dist.scatter(torch.empty(2), list(torch.randn(size, 2)), 0)
        got["gather"] = list(torch.empty(size, 6))
        dist.gather(x, got["gather"], 0)
        dist.barrier()
    else:
        dist.broadcast(x, 0)
        got["scatter"] = torch.empty(2)
        dist.scatter(got["scatter"], None, 0)
        dist.gather(x * rank, None, 0)
        dist.barrier()
    dist.reduce(x.clone(), 1, op=MAX)
    objects = [None] * size
    dist.all_gather_object(objects, "x" * rank)  # of another size on each rank
    got["sizes"] = torch.tensor([len(text) for text in objects])
    send, receive = [(rank + other) % 3 for other in range(size)], [(other + rank) % 3 for other in range(size)]
    got["all_to_all"] = torch.empty(sum(receive), 2)
    dist.all_to_all_single(got["all_to_all"], torch.randn(sum(send), 2), receive, send)
    got["lists"] = list(torch.empty(size, 2))  # gloo takes lists of one size only
    dist.all_to_all(got["lists"], list(torch.randn(size, 2)))
    got["even"] = torch.empty(size, 2)
    dist.all_to_all_single(got["even"], torch.randn(size, 2))
    got["sums"] = [torch.randn(3) for _ in range(3)]
    works = [dist.all_reduce(part, async_op=True) for part in got["sums"]]
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        for _ in range(4):
            dist.all_reduce(x[:4], group=group)
    [work.wait() for work in works]
    right, left = (rank + 1) % size, (rank - 1) % size
    got["ring"] = torch.empty(6)
    swap = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, got["ring"], left)]
    [work.wait() for work in dist.batch_isend_irecv(swap)]
    got["any"] = torch.zeros(1)
    dist.send(x[:1], 0) if rank == 1 else None
    dist.recv(got["any"]) if rank == 0 else None
    got["parts"] = torch.empty(2)
    dist.reduce_scatter_single(got["parts"], torch.randn(2 * size))
    got["all"] = torch.empty(6 * size)
    dist.all_gather_single(got["all"], x)
    name, other = dist.group.WORLD.group_name, rank ^ 1
    got["tags"] = [torch.zeros(elements) for elements in (2, 3, 2, 1, 3)]
    if rank % 2 == 0:  # messages of other shapes, received in another order: tags and order tell them apart
        F.isend(x[:2].clone(), other, 1, name)
        F.isend(x[:3].clone(), other, 2, name)
        F.batch_p2p_ops(["isend"] * 3, [other] * 3, [3, 3, 4], [x[:n].clone() for n in (2, 3, 1)], name)
    else:
        second, first = F.irecv(got["tags"][1], other, 2, name), F.irecv(got["tags"][0], other, 1, name)
        batch = F.batch_p2p_ops(["irecv"] * 3, [other] * 3, [3, 4, 3], got["tags"][2:], name)
        [F.wait_tensor(tensor) for tensor in (first, second, *batch)]
    dist.monitored_barrier()  # names who is missing by itself

    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        context = model.no_sync() if step == 2 else contextlib.nullcontext()
        with context:
            model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
    got["model"] = [parameter.detach() for parameter in model.parameters()]
    mesh = init_device_mesh("cpu", (size,))
    a, b = torch.randn(8, 4), torch.randn(4, 4)
    got["product"] = (distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Shard(0)])).full_tensor()
    return x, got


def twice_under_guard():
    """The correct program bare, and twice in guarded blocks; how many operations the ledger and the guard saw."""
    bare = correct_program()
    seen = []
    for _ in range(2):
        with Ledger() as ledger, CheckCollectives() as guard:
            guarded = correct_program()
        seen.append((len(ledger.entries), sum(guard.seen.values())))
    return bare, guarded, seen


def test_a_correct_program_is_left_alone():
    for rank, (bare, guarded, seen) in enumerate(launch(twice_under_guard, 4)):
        passed = 1 + int(rank == 0)  # what the guard lets pass: the monitored barrier, the receive from any source
        assert seen[0][0] > 20 and seen == [(seen[0][0], seen[0][0] - passed)] * 2
        torch.testing.assert_close(guarded, bare, rtol=0, atol=0, equal_nan=True)


def leftovers():
    store, keys = dist.distributed_c10d._get_default_store(), []
    for steps in (5, 50):
        with CheckCollectives():
            for step in range(steps):
                dist.barrier()
                if step % 2 == dist.get_rank():
                    dist.isend(torch.ones(1), 1 - dist.get_rank()).wait()
                else:
                    dist.irecv(torch.ones(1), 1 - dist.get_rank()).wait()
        dist.barrier()
        keys.append(store.num_keys())
    return keys


def test_the_store_does_not_grow_with_the_number_of_collectives():
    short, long = launch(leftovers, 2)[0]
    assert long - short <= 10


# --- messages: whichever rank comes second sees the difference --------------------------------------------------


def one_after_the_other() -> list[str]:
    """Of each message whose halves differ rank `first` starts its half, then the other rank its own: what do they say?
    By PyTorch's function, by the functional operator, and in a batch of two of which the first is right."""
    rank, name, x = dist.get_rank(), dist.group.WORLD.group_name, torch.ones(2 + dist.get_rank(), dtype=torch.int64)
    store, said = dist.distributed_c10d._get_default_store(), []
    kinds, both = [["isend", "irecv"], ["irecv", "isend"]][rank], [torch.ones(2), torch.ones(4 + rank)]
    plain = (lambda: dist.isend(x, 1, tag=number), lambda: dist.irecv(x, 0, tag=number))[rank]
    functional = (lambda: F.isend(x, 1, 5, name), lambda: F.irecv(x, 0, 5, name))[rank]
    for number, (first, start) in enumerate((
        (0, plain), (1, plain), (0, functional), (0, lambda: F.batch_p2p_ops(kinds, [1 - rank] * 2, [7, 8], both, name))
    )):  # fmt: skip
        try:
            with CheckCollectives():
                if rank != first:
                    store.wait([f"{number} has started"])
                start()
                store.set(f"{number} has started", "")
            said.append("nothing")
        except CollectiveMismatch as error:
            said.append(str(error))
    return said


def test_the_second_of_a_send_and_its_receive_sees_the_difference():
    one, other = launch(one_after_the_other, 2, timeout=100)
    assert [one[0], other[1], one[2], one[3]] == ["nothing"] * 4, "whoever comes first"
    for told in (other[0], one[1], other[2]):
        assert "message 1 from rank 0 to rank 1" in told and "send int64 [2]" in told and "recv int64 [3]" in told, told
    assert "from rank 1 to rank 0" in other[3] and "recv float32 [4]" in other[3] and "send float32 [5]" in other[3]
