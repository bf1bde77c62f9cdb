"""The order of the data depends on the seed and the step alone, and every example comes once per epoch."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import configure, refused

from common.data import Images, Plan, Text, digits, epoch_order, global_batch, shard, validation_text
from common.task import make_dataset


def test_order_depends_on_seed_and_step_alone():
    torch.manual_seed(1)
    first = global_batch(0, 5, 8, 100)
    torch.manual_seed(2)
    assert torch.equal(first, global_batch(0, 5, 8, 100))
    assert not torch.equal(first, global_batch(1, 5, 8, 100)), "another seed has the same order"
    assert not torch.equal(first, global_batch(0, 6, 8, 100)), "another step has the same examples"


def test_no_epoch_of_one_seed_is_an_epoch_of_another():
    """Else runs that are meant to differ read the same, shifted by an epoch."""
    orders = [tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16, "epochs of different seeds are alike"
    assert torch.equal(epoch_order(2**31 - 1, 9, 5), epoch_order(2**31 - 1, 9, 5)), "the largest seed"


def test_a_plan_counts_whole_steps_and_a_run_goes_on_from_any():
    plan = Plan(seed=0, batch_size=8, examples=30, data_rank=1, data_size=2, accumulate=2)
    assert (plan.steps, plan.slice_size) == (3, 4), "six examples do not fill a batch"
    whole = [[inputs.tolist() for inputs, _ in parts] for parts in shard(Numbers(), plan)]
    assert [len(part) for parts in whole for part in parts] == [2] * 6
    assert [[inputs.tolist() for inputs, _ in parts] for parts in shard(Numbers(), plan, start=1)] == whole[1:], (
        "from 1 on"
    )


def test_a_slice_is_cut_into_pairs_on_the_device():
    plan = Plan(seed=0, batch_size=8, examples=8, data_size=2, accumulate=2, device="meta")
    assert {part.device.type for pair in plan.cut(torch.arange(4), torch.arange(4)) for part in pair} == {"meta"}
    plan = Plan(seed=0, batch_size=8, examples=8, data_size=2, accumulate=2)
    pairs = plan.cut(torch.arange(4), 10 + torch.arange(4))
    assert [[part.tolist() for part in pair] for pair in pairs] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]


class Numbers:
    size = 20

    def batch(self, indices):
        return indices, -indices


def test_text_is_read_from_its_files_in_the_order_of_their_names_window_by_window(tmp_path):
    (tmp_path / "b.py").write_text("ghij\u00e9m", encoding="utf-8")  # of which one letter has two bytes
    (tmp_path / "a.py").write_text("abcde")
    (tmp_path / "c.txt").write_text("not Python")
    text = Text(4, str(tmp_path))  # 13 bytes: three windows of 4 and the byte after them
    assert bytes(text.tokens.tolist()) == b"abcde\nghij\xc3\xa9m" and text.size == 3, "all of the text, and no more"
    inputs, targets = text.batch(torch.tensor([0, 2]))
    assert [bytes(row.tolist()) for row in inputs] == [b"abcd", b"ij\xc3\xa9"], "inputs"
    assert [bytes(row.tolist()) for row in targets] == [b"bcde", b"j\xc3\xa9m"], "targets are the next bytes"
    for index in range(3):
        decoded = text.decode(text.record(index))
        assert [row.tolist() for row in decoded] == [row[0].tolist() for row in text.batch(torch.tensor([index]))], (
            "a stream carries what a batch has"
        )


def test_the_whole_text_is_read():
    """As many windows as fit into the standard library's own *.py files, a line break between two."""
    files = list(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    size = (sum(file.stat().st_size for file in files) + len(files) - 2) // 128
    assert Text(context=128).size == size, "windows in the whole text"


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "short.py").write_text("x = 1\n")
    with refused("6 bytes", "16"):
        Text(16, str(tmp_path))
    with refused("0 bytes"):
        Text(16, str(tmp_path / "missing"))


def test_text_for_validation_is_that_of_whole_packages(tmp_path, monkeypatch):
    for name in ("os.py", "json/b.py", "json/a.py", "json/c.txt", "json/deeper/d.py", "email/z.py", "asyncio/y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"in {name}.")
    monkeypatch.setattr("common.data.STANDARD_LIBRARY", tmp_path)
    read = bytes(validation_text(4).tokens.tolist()).decode()
    assert read == "in asyncio/y.py.\nin email/z.py.\nin json/a.py.\nin json/b.py.", "file by file, line by line"


def test_digits():
    images = digits()
    pixels, labels = images.batch(torch.tensor([0, 1, 2]))
    assert (images.size, images.channels, images.classes) == (1797, 1, 10)
    assert pixels.shape == (3, 1, 8, 8) and labels.tolist() == [0, 1, 2]
    assert (pixels.dtype, labels.dtype) == (torch.float32, torch.int64), "what a loss takes"
    assert (images.pixels.min(), images.pixels.max()) == (0, 1), "from black to white"


def test_torchvision_datasets_where_they_are(tmp_path):
    """CIFAR-10's own file format, with two made-up pictures a file."""
    import pickle

    from common.data import torchvision_images
    from common.vision import torchvision

    with refused("--dataset cifar10", "--download", "--data-dir"):
        torchvision_images("cifar10", str(tmp_path), download=False)

    def no_network(*args, **more):
        asked.append((args, more))
        raise OSError("no route to host")

    asked = []
    grey = SimpleNamespace(data=torch.full((2, 28, 28), 255, dtype=torch.uint8), targets=[1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.datasets, "CIFAR10", no_network)
        patch.setattr(torchvision.datasets, "FashionMNIST", lambda *args, **more: grey)
        with refused("--dataset cifar10", "no route to host"):
            make_dataset(configure(f"--task images --dataset cifar10 --data-dir {tmp_path} --download --dry-run"))
        assert asked == [((str(tmp_path),), {"train": True, "download": True})], "what torchvision is asked for"
        assert torchvision_images("fashion-mnist", "", download=False).pixels.shape == (2, 1, 28, 28), "one channel"
    cifar = torchvision.datasets.CIFAR10
    folder = tmp_path / cifar.base_folder
    folder.mkdir()
    picture = torch.full((2, 3, 32, 32), 255).byte()
    picture[:, 1, 5, 7] = 0  # no green in the row 5, column 7
    picture = picture.flatten(1)
    for name, _ in cifar.train_list + cifar.test_list:
        (folder / name).write_bytes(pickle.dumps({"data": picture.numpy(), "labels": [3, 4]}))
    (folder / cifar.meta["filename"]).write_bytes(pickle.dumps({"label_names": ["x"] * 10}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar, "_check_integrity", lambda self: True)
        patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *arguments: True)
        images = torchvision_images("cifar10", str(tmp_path), download=False)
    assert isinstance(images, Images) and images.pixels.shape == (10, 3, 32, 32)
    assert images.pixels.max() == 1.0 and images.labels.tolist() == [3, 4] * 5
    assert (images.pixels[0] == 0).nonzero().tolist() == [[1, 5, 7]], "channel, row, column"
