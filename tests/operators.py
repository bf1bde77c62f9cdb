"""A call that leads to each operator of torch.distributed, for the tests of the ledger and of the guard."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def together(call, *pairs):
    with dist._coalescing_manager():
        for pair in pairs:
            call(*pair)


def every_operator(numbers=6, more=2, dtype=torch.float32, source=1, how="sum") -> dict[tuple[str, str], Callable]:
    """For each operator of both tables a call that leads to it, with so many numbers of each rank where it takes one
    tensor, and some more where it takes several. Root is `source`."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    x, y, whole, whole_y = (torch.ones(length, dtype=dtype) for length in (numbers, more, numbers * size, more * size))
    parts, pieces = ([x.clone() for _ in range(size)] for _ in range(2))
    lists = [[x.clone(), y.clone()] for _ in range(size)]
    root, each = rank == source, [numbers] * size
    f, op = torch.ops._c10d_functional, getattr(dist.ReduceOp, how.upper())

    def message(send, receive):
        return {0: send, 1: receive}.get(rank, lambda: None)

    return {
        ("c10d", "allreduce_"): lambda: dist.all_reduce(x, op),
        ("c10d", "allreduce_coalesced_"): lambda: together(dist.all_reduce, (x, op), (y, op)),
        ("c10d", "broadcast_"): lambda: dist.broadcast(x, src=source),
        ("c10d", "reduce_"): lambda: dist.reduce(x, source, op),
        ("c10d", "allgather_"): lambda: dist.all_gather(parts, x),
        ("c10d", "_allgather_base_"): lambda: dist.all_gather_single(whole, x),
        ("c10d", "allgather_coalesced_"): lambda: dist.all_gather_coalesced(lists, [x, y]),
        ("c10d", "allgather_into_tensor_coalesced_"): lambda: together(
            dist.all_gather_single, (whole, x), (whole_y, y)
        ),
        ("c10d", "reduce_scatter_"): lambda: dist.reduce_scatter(x, parts, op),
        ("c10d", "_reduce_scatter_base_"): lambda: dist.reduce_scatter_single(x, whole, op),
        ("c10d", "reduce_scatter_tensor_coalesced_"): lambda: together(
            dist.reduce_scatter_single, (x, whole, op), (y, whole_y, op)
        ),
        ("c10d", "scatter_"): lambda: dist.scatter(x, parts if root else None, src=source),
        ("c10d", "gather_"): lambda: dist.gather(x, parts if root else None, dst=source),
        ("c10d", "alltoall_"): lambda: dist.all_to_all(parts, pieces),
        ("c10d", "alltoall_base_"): lambda: dist.all_to_all_single(whole.clone(), whole),
        ("c10d", "barrier"): lambda: dist.barrier(),
        ("c10d", "monitored_barrier_"): lambda: dist.monitored_barrier(),
        ("c10d", "send"): message(lambda: dist.send(x, dst=1), lambda: dist.recv(x, src=0)),
        ("c10d", "recv_"): message(lambda: dist.recv(x, src=1), lambda: dist.send(x, dst=0)),
        ("c10d", "recv_any_source_"): message(lambda: dist.recv(x), lambda: dist.send(x, dst=0)),
        ("_c10d_functional", "all_reduce"): lambda: f.all_reduce(x, how, name),
        ("_c10d_functional", "all_reduce_"): lambda: f.all_reduce_(x, how, name),
        ("_c10d_functional", "all_reduce_coalesced"): lambda: f.all_reduce_coalesced([x, y], how, name),
        ("_c10d_functional", "all_reduce_coalesced_"): lambda: f.all_reduce_coalesced_([x, y], how, name),
        ("_c10d_functional", "all_gather_into_tensor"): lambda: f.all_gather_into_tensor(x, size, name),
        ("_c10d_functional", "all_gather_into_tensor_out"): lambda: f.all_gather_into_tensor_out(
            x, size, name, out=whole
        ),
        ("_c10d_functional", "all_gather_into_tensor_coalesced"): lambda: f.all_gather_into_tensor_coalesced(
            [x, y], size, name
        ),
        ("_c10d_functional", "reduce_scatter_tensor"): lambda: f.reduce_scatter_tensor(whole, how, size, name),
        ("_c10d_functional", "reduce_scatter_tensor_out"): lambda: f.reduce_scatter_tensor_out(
            whole, how, size, name, out=x
        ),
        ("_c10d_functional", "reduce_scatter_tensor_coalesced"): lambda: f.reduce_scatter_tensor_coalesced(
            [whole, whole_y], how, size, name
        ),
        ("_c10d_functional", "all_to_all_single"): lambda: f.all_to_all_single(whole, each, each, name),
        ("_c10d_functional", "broadcast"): lambda: f.broadcast(x, source, name),
        ("_c10d_functional", "broadcast_"): lambda: f.broadcast_(x, source, name),
        ("_c10d_functional", "isend"): message(
            lambda: f.isend(torch.ones(6), 1, 0, name), lambda: f.irecv(torch.ones(6), 0, 0, name)
        ),
        ("_c10d_functional", "irecv"): message(
            lambda: f.irecv(torch.ones(6), 1, 0, name), lambda: f.isend(torch.ones(6), 0, 0, name)
        ),
        ("_c10d_functional", "batch_p2p_ops"): message(
            lambda: f.batch_p2p_ops(["isend", "irecv"], [1, 1], [0, 0], [torch.ones(6), torch.ones(2)], name),
            lambda: f.batch_p2p_ops(["isend", "irecv"], [0, 0], [0, 0], [torch.ones(2), torch.ones(6)], name),
        ),
    }
