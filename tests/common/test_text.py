"""One's own text: what is read of a file or a folder, what is kept for validation, and what is refused in one line."""

import torch
from helpers import SMALL, configure, metrics, train
from helpers import refused as refused_in_one_line

from common import data
from common.lab.launch import launch


def everything(text: data.Text) -> bytes:
    return bytes(text.tokens.tolist())


def test_a_file_is_cut_into_what_is_trained_on_and_the_end(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes(bytes(range(200)))
    trained, held_out = data.training_text(4, str(file)), data.validation_text(4, str(file))
    assert everything(trained) == bytes(range(190)) and everything(held_out) == bytes(range(190, 200)), "a twentieth"
    file.write_bytes(bytes(range(30)))
    assert everything(data.validation_text(4, str(file))) == bytes(range(25, 30)), "one context and the byte after it"


def test_a_folder_is_all_of_its_files_but_hidden_ones(tmp_path, monkeypatch):
    for name, text in {"b/two.md": "two", "a.txt": "one", ".git/no": "no", ".hidden": "no", "c/d/e": "x" * 40}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    both = [everything(text(4, str(tmp_path))) for text in (data.training_text, data.validation_text)]
    assert b"".join(both) == b"one\ntwo\n" + b"x" * 40
    entries = sorted(tmp_path.rglob("*"), reverse=True)
    monkeypatch.setattr(data.Path, "rglob", lambda folder, pattern: iter(entries))
    assert everything(data.training_text(4, str(tmp_path))) == both[0], "in the order of names, not of the disk"

    def refused(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(data.Path, "read_bytes", refused)
    with refused_in_one_line("--text", "a.txt: Permission denied"):
        data.training_text(4, str(tmp_path))


def test_what_cannot_be_learned_is_refused_in_one_line(tmp_path):
    with refused_in_one_line("--text", "nowhere"):
        data.training_text(4, str(tmp_path / "nowhere"))
    with refused_in_one_line("--text", str(tmp_path)):
        data.training_text(4, str(tmp_path))
    (tmp_path / "short").write_text("short")
    with refused_in_one_line("short", "5", "10", "4"):
        data.training_text(4, str(tmp_path / "short"))
    (tmp_path / "short").write_text("nine byte")
    with refused_in_one_line("short", "9", "10"):
        data.validation_text(4, str(tmp_path / "short"))
    (tmp_path / "short").write_text("just ten b")
    assert everything(data.training_text(4, str(tmp_path / "short"))) == b"just "


def test_a_run_learns_it_and_a_resumed_one_goes_on_with_it(tmp_path):
    """A text of one letter is soon learned, and so is its end; another text is another run."""
    (tmp_path / "letters").write_text("a" * 600)
    line = f"--text {tmp_path / 'letters'} --validate-every 20 --lr 0.03 --warmup-steps 0 --checkpoint-every 0"
    launch(train, 2, ([configure(line, 2, **SMALL, steps=20, strategy="ddp", run_dir=tmp_path / "run")],))
    last = metrics(tmp_path / "run")[-1]
    assert last["loss"] < 0.1 and last["validation_loss"] < 0.1
    config = configure("--resume --steps 21", run_dir=tmp_path / "run")
    assert config.text == str(tmp_path / "letters") and torch.equal(
        data.training_text(16, config.text).tokens, torch.full((570,), ord("a"), dtype=torch.uint8)
    )
    with refused_in_one_line("--text other"):
        configure("--resume --steps 21 --text other", run_dir=tmp_path / "run")
    (tmp_path / "letters").unlink()
    with refused_in_one_line("--text", "letters"):
        configure("--resume --steps 21", run_dir=tmp_path / "run")
