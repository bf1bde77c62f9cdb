"""What holds of any input, which hypothesis chooses: meshes and command lines that are read, pieces of a checkpoint,
damage to its files, the order of the data, the learning rate. The examples are the same in every run."""

import itertools
import json
import math
import string
from types import SimpleNamespace

import msgspec
import pytest
import torch
from helpers import configure, refused
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from common import manifest, stored
from common.axes import AXES, in_order, parse_axes, parse_order, resolve
from common.data import global_batch
from common.errors import UserError
from common.learning_rate import learning_rate
from common.pieces import boxes, pieces_of
from common.state import Where, interval, whole

few = settings(max_examples=40)
sizes = some.dictionaries(some.sampled_from(AXES), some.integers(1, 8), min_size=1)
shapes = some.lists(some.integers(1, 5), max_size=4).map(tuple)


# --- meshes and command lines -----------------------------------------------------------------------------------


@few
@given(sizes, some.sampled_from(["", " ", "  "]))
def test_a_mesh_that_is_written_is_read_again(axes, space):
    text = f"{space},{space}".join(f"{name}{space}={space}{size}" for name, size in axes.items())
    assert list(parse_axes(text).items()) == list(axes.items())


@few
@given(some.text(alphabet=string.ascii_lowercase + string.digits + "=,- .", max_size=30))
def test_a_mesh_is_read_or_refused_in_one_line(text):
    try:
        axes = parse_axes(text)
    except UserError as error:
        assert text in str(error) and "\n" not in str(error)
    else:
        assert axes and all(name in AXES and size >= 1 for name, size in axes.items())


@few
@given(sizes, some.integers(1, 64), some.data())
def test_the_rest_of_a_mesh_is_filled_in(axes, ranks, data):
    """So that its product is the number of ranks, or it is refused because there is no such number."""
    rest = data.draw(some.sampled_from([*axes, None]))
    known = math.prod(size for name, size in axes.items() if name != rest)
    try:
        found = resolve({name: -1 if name == rest else size for name, size in axes.items()}, ranks)
    except UserError:
        assert ranks % known if rest else known != ranks
    else:
        assert math.prod(found.values()) == ranks
        assert {name: size for name, size in found.items() if name != rest} == (
            {name: size for name, size in axes.items() if name != rest}
        )


@few
@given(some.permutations(AXES), some.integers(0, len(AXES)), sizes)
def test_an_order_names_its_axes_first(order, number, axes):
    named = order[:number]
    found = parse_order(",".join(named))
    assert sorted(found) == sorted(AXES) and list(found[:number]) == list(named)
    ordered = in_order(axes, found)
    assert ordered == axes and [found.index(name) for name in ordered] == sorted(map(found.index, ordered))


NUMBERS = {
    "steps": some.integers(1, 10**6), "batch_size": some.integers(1, 4096).map(lambda n: 12 * n), "seed":
    some.integers(0, 2**31 - 1), "lr": some.floats(1e-8, 10.0), "max_norm": some.floats(1e-3, 1e6), "log_every":
    some.integers(1, 1000), "warmup_steps": some.integers(0, 1000), "validate_every": some.integers(0, 99),
}  # fmt: skip


@few
@given(some.fixed_dictionaries({}, optional=NUMBERS), some.randoms())
def test_options_arrive_in_whatever_order_and_form(tmp_path, values, draw):
    """On the command line, in a file, or some here and some there."""
    names = list(values)
    draw.shuffle(names)
    here, there = names[: len(names) // 2], names[len(names) // 2 :]
    (tmp_path / "run.yaml").write_text("".join(f"{name.replace('_', '-')}: {values[name]!r}\n" for name in there))
    line = " ".join(f"--{name.replace('_', '-')}{draw.choice(' =')}{values[name]!r}" for name in here)
    config = configure(f"{line} --config {tmp_path / 'run.yaml'} --dry-run --mesh data=1")
    assert {name: getattr(config, name) for name in names} == values
    assert config.settings().items() >= json.loads(json.dumps(values)).items()


# --- checkpoints ------------------------------------------------------------------------------------------------


@few
@given(shapes, some.data())
def test_boxes_of_an_interval_are_its_elements_in_their_order(size, data):
    elements = torch.arange(math.prod(size)).view(size)
    start = data.draw(some.integers(0, elements.numel()))
    stop = data.draw(some.integers(start, elements.numel()))
    found = list(boxes(size, start, stop))
    read = [
        elements[tuple(slice(a, a + b) for a, b in zip(offset, of, strict=True))].flatten().tolist()
        for offset, of in found
    ]
    assert list(itertools.chain(*read)) == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(size) - 1), "no more of them than needed: they are files' entries"


@few
@given(shapes.filter(lambda shape: len(shape) > 0), some.integers(1, 5), some.data())
def test_what_ranks_hold_is_put_together_again(shape, ranks, data):
    """A tensor is cut along a dimension, each part's elements into intervals; what all hold is the whole once."""
    full = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    dim, again = data.draw(some.integers(0, len(shape) - 1)), torch.zeros(shape)
    assume(shape[dim] >= ranks)
    pieces = []
    for begin, end in itertools.pairwise([shape[dim] * rank // ranks for rank in range(ranks + 1)]):
        offset = tuple(begin if number == dim else 0 for number in range(len(shape)))
        size = tuple(end - begin if number == dim else length for number, length in enumerate(shape))
        box = Where(shape, offset, size, 0, math.prod(size))
        middle = data.draw(some.integers(0, box.stop))
        for where in (interval(box, 0, middle), interval(box, middle, box.stop)):
            values = where.take(full).clone()
            where.put(again, values)
            pieces += pieces_of("w", values, where)
    assert torch.equal(again, full), "take and put"
    count = torch.zeros(shape)
    for piece in pieces:
        place = tuple(slice(a, a + b) for a, b in zip(piece.offset, piece.tensor.shape, strict=True))
        assert torch.equal(full[place], piece.tensor), "a piece's elements are those of its box"
        count[place] += 1
    assert torch.equal(count, torch.ones(shape)), "each element is in one piece"
    assert whole(full).take(full).tolist() == full.flatten().tolist()


@few
@given(some.lists(some.binary(min_size=1, max_size=40), min_size=1, max_size=4), some.data())
def test_any_damage_to_a_checkpoint_is_found_by_one_of_its_ranks(tmp_path_factory, contents, data):
    folder = tmp_path_factory.mktemp("checkpoint")
    for number, content in enumerate(contents):
        (folder / f"__{number}_0.distcp").write_bytes(content)
    files = {file.name: (file.stat().st_size, manifest.checksum(file)) for file in folder.iterdir()}
    (folder / manifest.MANIFEST).write_text(manifest.seal({"step": 3}, files))
    ranks = data.draw(some.integers(1, 5))

    def found() -> list[str]:
        return [said for rank in range(ranks) if (said := manifest.damage(folder, rank, ranks))]

    assert found() == [] and manifest.read(folder).about == {"step": 3}
    file = data.draw(some.sampled_from(sorted(folder.iterdir())))
    content = bytearray(file.read_bytes())
    place = data.draw(some.integers(0, len(content) - 1))
    kind = data.draw(some.sampled_from(["flip a bit", "cut", "append", "remove"]))
    if kind == "flip a bit":
        content[place] ^= 1 << data.draw(some.integers(0, 7))
    file.write_bytes({"cut": content[:place], "append": content + b"\0"}.get(kind, content))
    if kind == "remove":
        file.unlink()
    assert found() and all(str(folder) in said for said in found()), f"{kind} at {place} of {file.name}"


@few
@given(some.lists(some.integers(1, 4), min_size=1, max_size=3), some.integers(1, 8), some.data())
def test_a_box_that_cannot_be_in_its_file_or_tensor_is_found(size, itemsize, data):
    """Rows of a tensor, one box after the other in one file, and then one of their numbers is another."""
    row = math.prod(size[1:])
    rows = [stored.Box([n, *[0] * (len(size) - 1)], [1, *size[1:]], "a", n * row * itemsize, row * itemsize)
            for n in range(size[0])]  # fmt: skip
    files = {"a": (size[0] * row * itemsize, "")}
    assert stored.wrong_boxes(stored.SavedTensor("float32", size, rows), files) == ""
    at = data.draw(some.integers(0, size[0] - 1))
    more, box = data.draw(some.integers(1, 9)), rows[at]
    dim = data.draw(some.integers(0, len(size) - 1))
    moved = [offset + (place == dim) * size[dim] for place, offset in enumerate(box.offset)]
    wrong = data.draw(some.sampled_from([
        {"begin": box.begin + (size[0] - at - 1) * row * itemsize + more}, {"bytes": files["a"][0] + more},
        {"bytes": row - 1}, {"file": "b"}, {"offset": moved}, {"offset": [*box.offset, 0]},
    ]))  # fmt: skip
    rows[at] = msgspec.structs.replace(box, **wrong)
    assert stored.wrong_boxes(stored.SavedTensor("float32", size, rows), files), wrong


@few
@given(some.integers(1, 5), some.data())
def test_metrics_are_whole_lines_and_end_where_they_were_being_written(tmp_path, steps, data):
    lines = [json.dumps({"step": n + 1, "loss": 1.5, "grad_norm": None, "step_seconds": 0.5}) for n in range(steps)]
    text = "\n".join([*lines, ""])
    end = data.draw(some.integers(0, len(text)))
    (tmp_path / "metrics.jsonl").write_text(text[:end])
    there = text[: end + 1].count("\n")  # the last may lack the end of its line
    assert [record["step"] for record in stored.records_of(tmp_path)] == list(range(1, there + 1))
    at = data.draw(some.integers(0, steps - 1))
    lines[at] = lines[at][: data.draw(some.integers(0, len(lines[at]) - 1))]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    with refused(f"line {at + 1}"):
        stored.records_of(tmp_path)


# --- data, learning rate ----------------------------------------------------------------------------------------


@few
@given(some.integers(0, 2**31 - 1), some.integers(1, 40), some.integers(1, 60), some.integers(0, 30))
def test_epochs_follow_each_other_whatever_the_batch(seed, batch, size, step):
    """Batches of one size are those of another, cut otherwise; and a step asks for nothing before it."""
    alone = global_batch(seed, step, batch, size)
    order = torch.cat([global_batch(seed, one, 1, size) for one in range(step * batch, (step + 1) * batch)])
    assert torch.equal(alone, order) and len(alone) == batch
    first = (step * batch // size + 1) * size - step * batch  # examples of the epoch in which it begins
    for begin, end in ((0, first), (first, first + size)):
        part = alone[begin:end].tolist()
        assert len({*part}) == len(part) and {*part} <= {*range(size)}, "an example twice in an epoch"


@few
@given(some.sampled_from(["constant", "cosine"]), some.integers(1, 200), some.integers(0, 50), some.floats(1e-6, 10.0))
def test_the_learning_rate_warms_up_in_equal_parts_and_then_is_that_of_pytorchs_schedule(schedule, steps, warmup, lr):
    """Which begins at the step after the warm-up, and whose cosine ends at a tenth."""
    config = SimpleNamespace(lr_schedule=schedule, steps=steps, warmup_steps=warmup, lr=lr)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup), eta_min=lr / 10)
    for step in range(steps):
        expected = lr * (step + 1) / warmup if step < warmup else lr
        if step >= warmup and schedule == "cosine":
            optimizer.step()
            cosine.step()
            (expected,) = cosine.get_last_lr()
        assert learning_rate(config, step) == pytest.approx(expected), step
