"""Where models are cut into stages, by what times, and what is moved to the device."""

import pytest
import torch
import torch.distributed as dist
from helpers import SlowDevice
from pipelines import batch, deep, mesh_of, small

from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.mesh import axis, make_mesh
from common.strategy import Setup
from course.fsdp.by_hand_mesh import MeshByHand
from course.model_parallel.by_hand_layers import count, layers_of
from course.pipeline import by_hand, schedules, split
from course.pipeline import pipeline_hybrids as hybrid
from course.pipeline.by_hand import PipelineDDPByHand
from course.pipeline.options import PipelineOptions

CPU = torch.device("cpu")


def test_named_places():
    layers = ["embedding", "blocks.0", "blocks.1", "head"]
    assert split.named("blocks.0: end", layers, 2) == (2, 4)
    assert split.named("head: beginning, blocks.0:beginning", layers, 3) == (1, 3, 4)
    assert split.named("blocks.0: end, blocks.1: beginning", layers, 2) == (2, 4)  # the same place twice


def named_parts(spec):
    return split.stages_of(deep(), 3, spec, dist.group.WORLD)


def test_stages_are_the_same_on_all_ranks():
    by_time = launch(named_parts, 2, ("auto-time",))
    assert by_time[0] == by_time[1] and len(by_time[0]) == 3
    assert [name for stage in by_time[0] for name in stage] == list(layers_of(deep()))
    told = split.stages_of(deep(), 3, "embedding: end, blocks.4: end")
    assert [len(stage) for stage in told] == [1, 5, 2]
    assert [len(stage) for stage in split.stages_of(deep(), 2)] == [4, 4]


def test_a_layer_takes_what_the_device_needs_for_both_passes_and_the_last_one_the_loss(monkeypatch):
    """Embedding, two blocks, head: forward 1, 2, 3 and 4 s, backward twice that, and the loss 50 ms in the shortest of
    three rounds. What is measured is a copy."""
    device, model, losses = SlowDevice(), small(), [0.09, 0.05, 0.07]
    for seconds, layer in enumerate(layers_of(model).values(), start=1):

        def forward(layer, inputs, output, seconds=seconds):
            device.work(seconds)
            if output.requires_grad:
                output.register_hook(lambda gradient: device.work(2 * seconds))

        layer.register_forward_hook(forward)

    def loss(logits, targets):
        device.work(losses.pop(0) if losses else 0.0)
        return equality.cross_entropy(logits, targets)

    monkeypatch.setattr(split, "cross_entropy", loss)
    monkeypatch.setattr(split.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(split, "synchronize", device.synchronize)
    assert split.measured(model, CPU) == pytest.approx([3.0, 6.0, 9.0, 12.05])
    assert losses == [] and all(p.grad is None for p in model.parameters())
    split.measured(small().requires_grad_(False), CPU)  # a frozen model has nothing to go backward for but inputs
    split.measured(small(), torch.device("meta"), rounds=1)
    assert not any(p.is_meta for p in model.parameters()), "the model stays where it was"


def test_replicas_are_cut_alike_though_each_would_measure_other_times(monkeypatch):
    def measured(model, device, context):
        seen.append((str(device), context.__name__))
        rank = dist.get_rank(dist.group.WORLD)
        return [9.0 if number == 3 - rank else 1.0 for number in range(len(layers_of(model)))]

    def cut():
        found, options = [], PipelineOptions(split_spec="auto-time", recompute="full")
        for strategy_class, axes in kinds.items():
            seen.clear()
            strategy = strategy_class(small(), equality.sgd, Setup(mesh_of(strategy_class, **axes), options))
            assert seen == [("cpu", "autocast")] * (dist.get_rank() == 0), "who measures, where, and in which context"
            executor = getattr(strategy, "executor", None)
            found.append((strategy.stages.names, executor and (executor.recompute, executor.dtype)))
        return found

    seen, kinds = [], {PipelineDDPByHand: {}, hybrid.PipelineDDP: {}, hybrid.PipelineFSDP: {}}
    kinds[MeshByHand] = {"pipeline": 2, "tensor": 2}
    monkeypatch.setattr(split, "measured", measured)
    as_rank_0_says, told = [["embedding", "blocks.0", "blocks.1"], ["head"]], (True, torch.float32)
    for found in launch(cut, 4):
        assert [names for names, _ in found] == [as_rank_0_says] * 4, "by what rank 0 has measured: a slow head"
        assert [executor for _, executor in found] == [told, None, None, told], "whether to recompute, and dtype"


def test_several_pipelines_are_not_measured_one_by_one():
    def cut():
        pipeline = axis(make_mesh({"data": 2, "pipeline": 1}), "pipeline")
        try:
            split.own_stages(small(), schedules.build("1f1b", 1, 4), pipeline, "auto-time")
        except UserError as error:
            return str(error)

    assert launch(cut, 2)[0].startswith("--split-spec auto-time")


def test_only_what_is_measured_and_only_the_own_share_are_moved_to_the_device():
    """Seen with the meta device in place of a GPU: what was moved there has no memory here."""

    def cut():
        model = small(layers=4).bfloat16()
        kept = layers_of(model)
        axis_of_all = axis(make_mesh({"pipeline": -1}), "pipeline")
        own = split.own_stages(model, schedules.build("1f1b", 2, 4), axis_of_all, device=torch.device("meta"))
        moved = [name for name, layer in kept.items() if next(layer.parameters()).is_meta]
        return moved, own.names[axis_of_all.rank], own.width, own.dtype, list(own.modules)

    for rank, (moved, names, *rest) in enumerate(launch(cut, 2)):
        assert moved == names and rest == [16, torch.bfloat16, [rank]], "width and type of what stages hand on"


def test_a_rank_without_memory_never_has_more_than_its_stages_and_a_weight():
    def bytes_of(model):
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(storages.values())

    def cut():
        most, broadcast = [], dist.broadcast
        with torch.device("meta" if dist.get_rank(dist.group.WORLD) > 0 else "cpu"):
            model = small(layers=6)

        def noting(*args, **kwargs):
            most.append(bytes_of(model))
            return broadcast(*args, **kwargs)

        pipeline, schedule = axis(make_mesh({"pipeline": -1}), "pipeline"), schedules.build("1f1b", 4, 4)
        weight, whole = max(p.nbytes for p in model.parameters()), 4 * count(model)
        dist.broadcast = noting
        own = split.own_stages(model, schedule, pipeline, everyone=pipeline.group)
        return max(most), bytes_of(own.model), weight, whole, 4 * len(list(small(layers=6).parameters()))

    first, *others = launch(cut, 4)
    assert first[0] == first[3]  # rank 0 has all, to begin with
    for most, own, weight, whole, shapes in others:
        assert own <= most <= own + weight + shapes < whole


def seconds_in_the_embedding_group():
    model = by_hand.PipelineByHand(equality.tied(), equality.sgd, Setup(make_mesh({"pipeline": 2}), PipelineOptions()))
    group = model.stages.embedding_group
    return group._get_backend(CPU).options._timeout.total_seconds()


def test_the_first_and_the_last_stage_wait_no_longer_than_the_world():
    assert launch(seconds_in_the_embedding_group, 2, timeout=77) == [77.0, 77.0], "seconds in the embedding's group"


def test_tied_pipelines_of_other_ranks_can_follow_each_other():
    """torch.distributed names a group that its members alone make by the number of groups that each of them has: where
    ranks differ in it, they wait for each other for ever."""

    def losses():
        kind, found = by_hand.PipelineByHand, []
        for axes in ({"pipeline": 4}, {"data": 2, "pipeline": 2}):
            torch.manual_seed(3)
            strategy = kind(equality.tied(), equality.sgd, Setup(make_mesh(axes), PipelineOptions()))
            found.append(strategy.step([batch()])[0].item())
        return found

    for of_four, of_two in launch(losses, 4):
        assert of_four == pytest.approx(of_two, rel=1e-5), "four stages, then two pipelines of two, on equal batches"
