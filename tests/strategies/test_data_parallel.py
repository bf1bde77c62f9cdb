"""Chapter 02's five moves on any list of devices: equal to one process, and everything that gets lost is known."""

import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import code_of_page, definitions
from torch import nn

from common import mesh as meshes
from common.lab import equality, recordings
from common.lab.equality import prove
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.strategy import Setup
from course.data_parallel import by_hand, fake_gpus, pictures
from course.data_parallel import distributed_training as script
from course.model_parallel import layers_on_devices

CPU = torch.device("cpu")


def on(devices: int, strategy_class=by_hand.ThreadedDataParallelByHand):
    class OnDevices(strategy_class):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, devices=[CPU] * devices)

    return OnDevices


DP, LAYERS = by_hand.ThreadedDataParallelByHand, layers_on_devices.LayersOnDevices  # of one process each


@pytest.mark.parametrize("cls, devices", [(DP, 1), (DP, 3), (DP, 5), (LAYERS, 1), (LAYERS, 3), (LAYERS, 9)])
def test_equals_one_process_on_any_number_of_devices(cls, devices):
    """Slices of 8 examples are 3, 3, 2 on three devices, and 2, 2, 2, 2 and none on five; nine are more than layers."""
    rows = prove(on(devices, cls), 1, cases=equality.COVERING)
    assert len(rows) == len(equality.COVERING)
    if devices == 1 or cls is LAYERS:
        assert all(row.bitwise for row in rows if row.case.accumulate == 1)


class Net(nn.Module):
    """With a buffer that counts, and an attribute that counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count = 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        return self.layer(x)


def test_what_replicas_change_is_lost_but_for_the_buffers_of_the_first():
    model = Net()
    for _ in range(3):
        by_hand.data_parallel(model, torch.randn(4, 3), [CPU] * 4)
    assert (model.calls.item(), model.count) == (3, 0)  # of 12 calls


def test_batch_norm_learns_its_statistics_from_the_first_slice_alone():
    model = nn.BatchNorm1d(2, momentum=1.0)
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0], [10.0, 20.0], [30.0, 40.0]])
    y = by_hand.data_parallel(model, x, [CPU] * 2)
    assert model.running_mean.tolist() == [1.0, 2.0] and model.num_batches_tracked == 1
    for part in y.chunk(2):
        assert part.mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)  # each normalised by its own slice


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_threads_compute_in_the_callers_precision(dtype):
    model, x = Asks(), torch.randn(4, 2)
    with torch.autocast("cpu", dtype):
        assert by_hand.data_parallel(model, x, [CPU] * 2).dtype == dtype
    with torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert by_hand.data_parallel(model, x, [CPU] * 2).dtype == torch.float32


def test_threads_record_for_autograd_only_if_the_caller_does():
    model, x = Asks(), torch.randn(4, 2)
    for does in (False, True):
        with torch.set_grad_enabled(does):
            replicas, slices = by_hand.replicate(model, [CPU] * 2), by_hand.scatter(x, [CPU] * 2)
            assert [y.requires_grad for y in by_hand.parallel_apply(replicas, slices)] == [does] * 2


def test_threads_work_on_the_callers_stream(monkeypatch):
    """No GPU is needed to see which stream is current where a replica runs. As with PyTorch, each thread has its own,
    and a new thread the default one: there its kernels would not wait for the copies on the caller's."""
    current = threading.local()

    @contextmanager
    def stream(chosen):
        before, current.stream = getattr(current, "stream", None), chosen
        yield
        current.stream = before

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(current, "stream", f"default, {device}"))
    slices = [SimpleNamespace(device=torch.device("cuda", place)) for place in (0, 1)]
    replicas = [lambda part: torch.cuda.current_stream(part.device)] * 2
    assert by_hand.parallel_apply(replicas, slices) == ["default, cuda:0", "default, cuda:1"]
    with stream("the caller's"):
        assert by_hand.parallel_apply(replicas, slices) == ["the caller's"] * 2


def test_an_exception_in_a_thread_comes_out_with_its_traceback():
    class Fails(nn.Module):
        def forward(self, x):
            if x[0] > 1:
                raise ValueError("example 2 is bad")
            return x

    before = threading.active_count()
    with pytest.raises(ValueError, match="example 2 is bad") as caught:
        by_hand.data_parallel(Fails(), torch.arange(4.0), [CPU] * 2)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename == __file__ and last.name == "forward"
    assert threading.active_count() == before


def test_nothing_is_sent_and_every_rank_trains_by_itself():
    def on_rank():
        sent = []
        tokens = torch.arange(4 * equality.CONTEXT).view(4, -1) % equality.VOCABULARY
        for version in (script.ThreadedDataParallel, by_hand.ThreadedDataParallelByHand):
            strategy = version(equality.tied(), equality.sgd, Setup(make_mesh({"data": -1})))
            assert (strategy.data_rank, strategy.data_size) == (0, 1)
            with Ledger() as ledger:
                strategy.step([(tokens, tokens)])
            sent.append(len(ledger.entries))
        return sent

    assert launch(on_rank, 2) == [[0, 0]] * 2


def test_without_two_gpus_it_says_what_it_does_instead(capfd):
    def on_rank():
        assert by_hand.devices_of(make_mesh({"data": -1})) == [CPU, CPU]
        setup, devices = Setup(make_mesh({"data": -1})), [CPU, torch.device("meta")]
        strategy = by_hand.ThreadedDataParallelByHand(Asks(), equality.sgd, setup, devices)
        assert {p.device for p in strategy.model.parameters()} == {CPU}, "the model is on the first device"

    note = "note: no two GPUs for nn.DataParallel; dp by hand uses 'cpu' twice"
    for ranks in (1, 2):
        launch(on_rank, ranks)
        assert capfd.readouterr().out == f"[rank 0] {note}\n"


def with_two_gpus() -> int:
    """As if there were two GPUs: which class is chosen, for which devices, and what its threads would compute in."""
    made, gpu, mesh = [], torch.device("cuda", 0), make_mesh({"data": -1})
    with pytest.MonkeyPatch.context() as patch:
        for module in (by_hand, meshes):
            patch.setattr(module, "device_of", lambda mesh: gpu)
        patch.setattr(script.nn, "DataParallel", lambda model, devices: made.append((model, devices)) or model)
        patch.setattr(nn.Module, "to", lambda self, device: self)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        strategy = script.ThreadedDataParallel(Asks(), equality.sgd, Setup(mesh, precision="bf16"))
    if mesh.size() > 1:
        return len(made)
    ((model, devices),) = made
    assert model is strategy.model and devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    types = []
    strategy.model.linear.register_forward_pre_hook(lambda *_: types.append(torch.get_autocast_dtype("cuda")))
    thread = threading.Thread(target=strategy.parallel, args=(torch.randn(1, 2),))
    thread.start()
    thread.join()
    assert types == [torch.bfloat16] != [torch.get_autocast_dtype("cuda")]  # which a new thread has set to float16
    return len(made)


def test_with_two_gpus_it_is_torchs_data_parallel_with_its_threads_put_right():
    assert launch(with_two_gpus, 1) == [1]
    assert launch(with_two_gpus, 2) == [0, 0]  # of several ranks, each has one GPU


def counted_on_pretended_gpus(count: int):
    """Bytes after each move, and copied, for a small model with tied weights on GPUs that are not there."""
    with fake_gpus.pretend_gpus(count, equality.tied) as (devices, model, meter):
        inputs = torch.zeros(12, equality.CONTEXT, dtype=torch.int64, device=devices[0])
        slices = by_hand.scatter(inputs, devices)
        replicas = by_hand.replicate(model, devices)
        held = [dict(meter.now)]
        outputs = by_hand.parallel_apply(replicas, slices)
        held.append(dict(meter.now))
        output, outputs = by_hand.gather(outputs, devices[0]), None
        held.append(dict(meter.now))
        output.sum().backward()
        gradients = {parameter.grad.device.index for parameter in model.parameters()}
        del output, replicas, slices, inputs
        return held, dict(meter.moved), dict(meter.now), gradients


@pytest.mark.parametrize("count", [2, 3])
def test_bytes_held_and_copied_are_those_of_the_formulas(count):
    ((held, moved, left, gradients),) = launch(counted_on_pretended_gpus, 1, (count,))
    parameters = 4 * sum(parameter.numel() for parameter in equality.tied().parameters())
    inputs, outputs = 12 * equality.CONTEXT * 8, 12 * equality.CONTEXT * equality.VOCABULARY * 4
    others = range(1, count)
    assert held[0] == {0: parameters + inputs} | {i: parameters + inputs // count for i in others}
    kept = {held[1][i] - held[0][i] for i in range(count)}
    assert len(kept) == 1 and kept.pop() > outputs // count  # activations, alike on all
    freed = outputs // count
    assert held[2] == {0: held[1][0] + outputs - freed} | {i: held[1][i] - freed for i in others}
    assert moved == {(0, i): parameters + inputs // count + outputs // count for i in others} | {
        (i, 0): parameters + outputs // count for i in others
    }
    assert left == {0: 2 * parameters} | dict.fromkeys(others, 0) and gradients == {0}


@pytest.mark.parametrize("count", [2, 4])
def test_the_first_gpu_holds_three_times_the_parameters_and_four_times_the_outputs(count):
    """Four: the gathered outputs, the logarithms of their probabilities, and the gradients of both."""
    step = fake_gpus.step_of(equality.tied, count, batch=12, context=equality.CONTEXT)
    outputs, tokens = 12 * equality.CONTEXT * equality.VOCABULARY * 4, 12 * equality.CONTEXT * 8
    assert step.parameters == 4 * sum(parameter.numel() for parameter in equality.tied().parameters())
    expected = 3 * step.parameters + 2 * tokens + step.activations - outputs // count + 4 * outputs + 8
    assert step.peak[0] == expected > step.peak[1]


def test_the_functions_that_the_page_builds_are_those_of_by_hand():
    built = {}
    for cell in code_of_page("02_data_parallel/01_data_parallel.ipynb"):
        built |= definitions(cell)
    finished = definitions(Path(by_hand.__file__).read_text())
    for name in ("scatter", "replicate", "gather", "data_parallel"):
        assert built[name] == finished[name], f"{name} differs between the page and by_hand.py"


def test_the_recorded_forward_pass_is_between_the_zeroing_of_gradients_and_the_backward_pass():
    rows = pictures.recorded_forward()
    recorded = recordings.read("trace_naive_ddp_2xv100")
    all_reduces = sum(row["kind"] == "all_reduce" for row in recorded)
    earlier = [row for row in recorded if row["launch_us"] < rows[0]["launch_us"]]
    assert len(earlier) == all_reduces == 404 and {row["kind"] for row in rows} == {"compute"}  # one for each gradient
    assert not any("backward" in row["name"] or "_ba" in row["name"] for row in rows)
    busy = sum(row["duration_us"] for row in rows) / (rows[-1]["launch_us"] - rows[0]["launch_us"])
    assert 0.6 < busy < 0.7


def test_no_thread_takes_a_second_replica_however_quick_the_first():
    """Autograd numbers operations thread by thread and adds up gradients in that order: a thread that took a second
    replica, because it was done with its first, would have them rounded otherwise on one rank than on another."""

    seen = []

    class Where(nn.Linear):
        def forward(self, inputs):
            seen.append(threading.get_ident())
            return super().forward(inputs)

    for _ in range(20):
        seen.clear()
        by_hand.data_parallel(Where(1, 1), torch.ones(3, 1), [CPU] * 3)
        assert len(set(seen)) == 3
