"""What the doctor writes for a bug report: everything that helps, and nobody's name; what it counts, and its pins."""

import json
import os
import platform
import socket
import sys

import pytest
from helpers import write_facts

from common import doctor


def test_the_report_names_nobody(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-laptop.example.org")
    monkeypatch.setattr(socket, "getfqdn", lambda: "janes-laptop.example.org")
    run_dir = tmp_path / "runs" / "of jane"
    run_dir.mkdir(parents=True)
    config = {"steps": 3, "run_dir": "/data/jane/runs/1", "data_dir": "photos", "text": "/data/jane/poems"}
    write_facts(run_dir, config, torch="2.13.0", launch=["none_x"])
    lines = [{"step": step, "loss": 1.5, "grad_norm": 1.0, "step_seconds": 0.5} for step in (1, 2)]
    lines[1]["ranks"] = [{"host": "janes-laptop.example.org"}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("a", "z"):  # older runs
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "config.json").write_text("{}")
        os.utime(tmp_path / "runs" / name / "config.json", (0, 0))

    def check_path():
        where = f"in {doctor.ROOT}/runs on janes-laptop, janes-laptop.example.org and 127.0.0.1"
        return f"/opt/jane/bin/python of jane at 10.1.2.3, {where}"

    monkeypatch.setattr(doctor, "CHECKS", [check_path])
    assert doctor.main([]) == 0 and not (tmp_path / "doctor-report.txt").exists(), "a report that nobody asked for"
    assert doctor.main(["--report"]) == 0
    text = (tmp_path / "doctor-report.txt").read_text()
    assert "OK   path        PATH of NAME at ADDRESS, in COURSE/runs on NAME, NAME and 127.0.0.1\n" in text
    assert "torch: 2.13.0" in text and "  steps: 3" in text, "the newest run"
    assert 'last of 2 steps: {"step": 2, "loss": 1.5' in text
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    assert f"## machine\n{machine}\nCPython\n" in text, "the system, the architecture and the cores"
    assert text.startswith("# Report of python -m common.doctor\n\n## checks\nOK   path "), "what it is"
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## checks", "## machine", "## versions", "## last run"]
    assert "jane" not in text and "/data" not in text and "none_x" not in text
    assert "photos" not in text, "a folder with a name of its own, from here"
    assert "written: doctor-report.txt" in capsys.readouterr().out
    (tmp_path / "doctor-report.txt").unlink(), (tmp_path / "doctor-report.txt").mkdir()
    with pytest.raises(SystemExit) as refused:
        doctor.main(["--report"])
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and "doctor-report.txt" in line and "Is a directory" in line


def test_what_names_somebody_is_replaced(monkeypatch):
    for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("USERNAME", "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(socket, "getfqdn", lambda: "box.example.org")
    monkeypatch.setattr(doctor.Path, "home", lambda: doctor.Path("/people/jane"))
    for text, expected in {
        "written to /people/jane/my/runs": "written to HOME/my/runs",
        f"{doctor.ROOT}/runs, 8/8 of /srv/data/x.txt": "COURSE/runs, 8/8 of PATH",
        "jane on box.example.org, janet": "NAME on NAME, janet",
        "localhost is 127.0.0.1, not 192.0.2.17": "localhost is 127.0.0.1, not ADDRESS",
        "torch 2.13.0, 3.50 GB free for runs/": "torch 2.13.0, 3.50 GB free for runs/",
    }.items():
        assert doctor.anonymous(text) == expected, "what a report has in its place"


def test_a_run_that_cannot_be_read_spoils_no_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctor.last_run() == ["none under runs/"]
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for content in ("{", "{}", '{"config": {}}'):
        (tmp_path / "runs" / "a" / "config.json").write_text(content)
        (said,) = doctor.last_run()
        assert said.startswith("cannot be read: ") and "config.json" in said, content


@pytest.mark.parametrize("python, numpy", [((3, 10, 4), "2.2.6"), ((3, 11, 0), "2.4.6"), ((3, 14, 1), "2.4.6")])
def test_pins_for_this_python(monkeypatch, python, numpy):
    monkeypatch.setattr(sys, "version_info", python)
    pins = doctor.pinned((doctor.ROOT / "requirements.txt").read_text())
    assert pins["numpy"] == numpy
    assert {"torch", "torchvision", "jupyterlab", "nbval", "scikit-learn", "PyYAML", "ruff"} <= set(pins)
    assert all(pins.values())
