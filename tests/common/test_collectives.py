"""What every chapter needs of collectives, on groups that are not the whole world."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.collectives import (
    all_reduce_together,
    broadcast_module,
    global_norm,
    leave_meta,
    pieces,
)
from common.lab.launch import launch
from common.lab.ledger import Ledger


def all_three() -> dict:
    """On ranks 0 to 3, whose pairs are the groups: 0 with 1, and 2 with 3."""
    rank, pairs = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, found = pairs[rank // 2], {}
    module = nn.BatchNorm1d(2)
    nn.init.constant_(module.weight, 10.0 + rank)
    module.running_mean.fill_(20.0 + rank)
    module.num_batches_tracked.fill_(30 + rank)
    with Ledger() as ledger:
        broadcast_module(module, pair)
    found["broadcasts"] = len(ledger.entries)
    found["module"] = [module.weight[1].item(), module.running_mean[1].item(), module.num_batches_tracked.item()]

    # Over a pair's ranks cut: 3 and 4, 5 together; on every rank whole: 12. So 13.
    cut, whole = [torch.tensor([3.0 + rank % 2])], [torch.tensor([[12.0]])]
    found["norm"] = global_norm([(cut, [pair]), (whole, [])], torch.device("cpu")).item()
    found["nothing here"] = global_norm([(cut if rank % 2 else [], [pair])], torch.device("cpu")).item()
    found["half"] = global_norm([([torch.full((3,), 300.0, dtype=torch.float16)], [])], torch.device("cpu")).item()

    tensors = [torch.tensor([rank, 1.0]), torch.tensor([[rank, 2]]), torch.tensor([[10.0 * rank]])]
    with Ledger() as ledger:
        all_reduce_together(tensors, pair)
    found["together"] = [tensor.tolist() for tensor in tensors]
    found["sent"] = [(entry.operation, entry.payload, entry.ranks) for entry in ledger.entries]
    with Ledger() as ledger:
        all_reduce_together(tensors, dist.new_group([rank], use_local_synchronization=True))
    found["alone"] = [tensor.tolist() for tensor in tensors], ledger.calls
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(all_three, 4)


def test_a_module_is_that_of_the_groups_first_rank_buffers_included(ranks):
    assert [found["module"] for found in ranks] == [[10.0, 20.0, 30]] * 2 + [[12.0, 22.0, 32]] * 2, (
        "parameter and buffers of the group's first rank"
    )
    assert [found["broadcasts"] for found in ranks] == [2] * 4, "one for what is float32, one for the counter"


def test_the_norm_adds_what_is_cut_over_its_group_and_counts_the_rest_once(ranks):
    assert [found["norm"] for found in ranks] == [pytest.approx(13.0)] * 4, "the root of 3^2 + 4^2 + 12^2"
    assert [found["nothing here"] for found in ranks] == [pytest.approx(4.0)] * 4, "a rank without tensors takes part"
    assert ranks[0]["half"] == pytest.approx(300 * 3**0.5, rel=1e-3), "a square in float16 would be infinite"


def test_the_norm_of_a_long_vector_is_that_of_its_elements():
    """PyTorch's own, on the CPU, is off by 6e-5 here: more than the proofs of equality allow in all."""
    torch.manual_seed(0)
    vector = torch.randn(3_000_000)
    found, expected = global_norm([([vector], [])], torch.device("cpu")).item(), vector.double().norm().item()
    assert found == pytest.approx(expected, rel=1e-6), f"off by {abs(found / expected - 1):.1e}"


def test_a_vector_on_another_device_is_in_one_piece():
    here, elsewhere = torch.empty(1 << 17), torch.empty(1 << 17, device="meta")
    shapes = [[tuple(piece.shape) for piece in pieces(vector)] for vector in (here, elsewhere)]
    assert shapes == [[(65536,)] * 2, [(131072,)]], "pieces on the CPU, and on a GPU"


def test_leaving_meta_moves_buffers_and_no_parameter_that_has_memory():
    model = leave_meta(nn.BatchNorm1d(2), torch.device("meta"))  # in the place of a GPU
    assert [tensor.device.type for tensor in model.parameters()] == ["cpu"] * 2, "parameters"
    assert [tensor.device.type for tensor in model.buffers()] == ["meta"] * 3, "buffers"


def test_tensors_of_a_type_are_summed_in_one_message(ranks):
    for rank, found in enumerate(ranks):
        a, b = (0, 1) if rank < 2 else (2, 3)
        assert found["together"] == [[a + b, 2.0], [[a + b, 4]], [[10.0 * (a + b)]]], "tensors of two types"
        assert found["sent"] == [("all_reduce", 12, 2), ("all_reduce", 16, 2)], "three floats, two whole numbers"
        assert found["alone"] == (found["together"], {})


def one_at_a_time() -> tuple:
    """On ranks 0 and 1: a model, on the meta device on rank 1, whose first layer only rank 0 keeps. Its numbers on this
    rank after the layers have been taken, who was given out, what is tied, and the bytes of the first layer."""
    rank, group = dist.get_rank(), dist.group.WORLD
    with torch.device("meta" if rank else "cpu"):
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(3, 2))
        model[3].weight = model[1].weight
    model[1].bias.requires_grad_(False)
    for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
        tensor.detach().fill_(number + 10)
    leave_meta(model, torch.device("cpu"))
    own = set(model.parameters()) - {model[0].weight} if rank else None
    given: list[tuple[str, float]] = []
    broadcast_module(model, group, own=own, cut=lambda name, parameter: given.append((name, parameter.max().item())))
    state = {name: tensor.max().item() for name, tensor in model.state_dict().items()}
    tied = model[3].weight is model[1].weight and not model[1].bias.requires_grad
    return state, given, tied, model[0].weight.untyped_storage().nbytes()


def test_weights_come_from_the_groups_first_rank_one_at_a_time():
    first, second = launch(one_at_a_time, 2)
    (kept, given, *_), expected = first, second[0]
    assert set(kept.values()) == {10, 11, 12, 13, 14, 15, 16, 17, 18}, "values of rank 0"
    assert expected == kept | {"0.weight": 0.0}, "values of rank 0"
    assert second[1] == given[1:] and given[0] == ("0.weight", 10.0), "given out one by one, with rank 0's values"
    assert first[2] and second[2], "what was tied or frozen still is"
    assert (first[3], second[3]) == (24, 4), "bytes of a layer that rank 1 does not keep: one number"
