"""The doctor finds nothing on a healthy machine, and each planted fault."""

import importlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from common import doctor
from common.grading import sandbox


def run(*options, **environment):
    command = [sys.executable, *options, "-m", "common.doctor"]
    return subprocess.run(command, cwd=doctor.ROOT, env=os.environ | environment, capture_output=True, text=True)


def fix(check):
    """What the check says is to fix."""
    verdict, text = doctor.examine(check)
    assert verdict == "FIX", f"not noticed: {text}"
    assert "\n" not in text
    return text


def returns(value):
    return lambda *args, **kwargs: value


def raises(error):
    def raise_it(*args, **kwargs):
        raise error

    return raise_it


def test_a_healthy_machine_needs_nothing():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]  # free once it is closed
    result = run(OMP_NUM_THREADS="1", PET_MASTER_PORT=str(port))
    lines = result.stdout.splitlines()
    assert [line[:3] for line in lines[:-1]] == ["OK "] * len(doctor.CHECKS), result.stdout + result.stderr
    assert lines[-1] == "all OK"
    assert result.returncode == 0


def test_without_any_package_there_is_advice_and_no_traceback():
    result = run("-S")  # no site-packages
    lines = result.stdout.splitlines()
    assert result.returncode == 1
    assert result.stderr == ""
    assert len(lines) == len(doctor.CHECKS) + 1
    assert "torch is missing" in result.stdout
    assert "FIX  gloo        No module named 'torch': pip install -r requirements.txt" in lines
    assert lines[-1].endswith(" to fix")


def test_every_check_is_called():
    assert set(doctor.CHECKS) == {value for name, value in vars(doctor).items() if name.startswith("check_")}


def test_a_check_that_breaks_is_reported():
    assert fix(raises(ValueError("one\ntwo"))) == "ValueError: one two"


def test_python_too_old(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert "3.9.18 is too old" in fix(doctor.check_python)
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert doctor.examine(doctor.check_python) == ("OK", f"3.10.0, {sys.executable}"), "the oldest that will do"


@pytest.mark.parametrize("python, numpy", [((3, 10, 4), "2.2.6"), ((3, 11, 0), "2.4.6"), ((3, 14, 1), "2.4.6")])
def test_pins_for_this_python(monkeypatch, python, numpy):
    monkeypatch.setattr(sys, "version_info", python)
    pins = doctor.pinned((doctor.ROOT / "requirements.txt").read_text())
    assert pins["numpy"] == numpy
    assert {"torch", "torchvision", "jupyterlab", "nbval", "scikit-learn", "PyYAML", "ruff"} <= set(pins)
    assert all(pins.values())


def test_other_version(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "tqdm" else version(name))
    assert fix(doctor.check_packages).startswith("tqdm is 9.9 instead of ")


def test_missing_package_and_one_without_a_pin(monkeypatch, tmp_path):
    tmp_path.joinpath("requirements.txt").write_text("# some\ntorch\nno-such-package==1.0\nnone==2\n-e .\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    both = "no-such-package is missing, none is missing: pip install -r requirements.txt"
    assert fix(doctor.check_packages) == both


def test_the_build_of_a_version_does_not_matter(monkeypatch, tmp_path):
    tmp_path.joinpath("requirements.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", returns("2.13.0+cu130"))
    assert doctor.examine(doctor.check_packages)[0] == "OK"


def test_common_from_another_checkout_or_none(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "ROOT", tmp_path)
        assert "another checkout" in fix(doctor.check_common)
    monkeypatch.setattr(doctor.subprocess, "run", returns(subprocess.CompletedProcess([], 1, stdout="")))
    assert "not importable" in fix(doctor.check_common)


@pytest.fixture
def import_beside(monkeypatch, tmp_path):
    """Import common.vision anew, with the given source in the place of torchvision."""
    ours = [name for name in sys.modules if name.split(".")[0] == "torchvision" or name == "common.vision"]
    before = {name: sys.modules.pop(name) for name in ours}
    monkeypatch.syspath_prepend(tmp_path)

    def import_it(source):
        tmp_path.joinpath("torchvision.py").write_text(source)
        return importlib.import_module("common.vision")

    yield import_it
    for name in ("torchvision", "common.vision"):
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_torchvision_can_be_used():
    from common.vision import torchvision

    assert torchvision.models.resnet18(num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert doctor.examine(doctor.check_torchvision)[0] == "OK"


def test_names_of_missing_operators_are_declared(import_beside, monkeypatch):
    """As beside a build of torch that does not fit: torchvision imports once the names of both operators are there."""

    class Library:
        def __init__(self, *where):
            assert where == ("torchvision", "FRAGMENT")

        def define(self, schema):
            torch.library.declared.append(schema.partition("(")[0])

    monkeypatch.setattr(torch.library, "declared", [], raising=False)
    monkeypatch.setattr(torch.library, "Library", Library)
    missing = "raise RuntimeError('operator torchvision::nms does not exist')"
    module = import_beside(f"import torch\nif torch.library.declared != ['nms', 'qnms']:\n    {missing}\n")
    assert module.torchvision is sys.modules["torchvision"]


def test_torchvision_that_imports_is_left_alone(import_beside):
    assert not hasattr(import_beside(""), "_library")


def test_torchvision_that_is_broken_otherwise_is_not_hidden(import_beside):
    with pytest.raises(RuntimeError, match="different CUDA"):
        import_beside("raise RuntimeError('compiled with different CUDA versions')")
    assert "different CUDA" in fix(doctor.check_torchvision)


def test_kernel_of_another_python(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    # One that is gone, and one that is there; this one, and whichever runs Jupyter.
    for python, verdict in ((tmp_path / "python", "FIX"), ("/bin/sh", "FIX"), (sys.executable, "OK"), ("python", "OK")):
        kernel = {"argv": [str(python), "-m", "ipykernel_launcher"], "display_name": "other"}
        folder.joinpath("kernel.json").write_text(json.dumps(kernel))
        found, text = doctor.examine(doctor.check_jupyter)
        assert found == verdict and ("not this Python" in text) == (verdict == "FIX"), f"a kernel of {python}: {text}"


def test_no_kernel_and_no_jupyterlab(monkeypatch):
    from jupyter_client import kernelspec

    with monkeypatch.context() as patch:
        no_kernel = raises(kernelspec.NoSuchKernel("python3"))
        patch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", no_kernel)
        assert "no kernel named python3" in fix(doctor.check_jupyter)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", returns(None))
    assert "JupyterLab is missing" in fix(doctor.check_jupyter)


@pytest.mark.parametrize("threads, told", [("many", "no number"), ("0", "no number"), ("100000", "crowd")])
def test_threads(monkeypatch, threads, told):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert told in fix(doctor.check_cores)


def test_half_of_the_cores_for_each_of_two_ranks_is_no_crowd(monkeypatch):
    for cores, threads, verdict in ((4, "2", "OK"), (4, "3", "FIX"), (1, "1", "OK")):
        monkeypatch.setattr(os, "sched_getaffinity", returns(range(cores)), raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert doctor.examine(doctor.check_cores)[0] == verdict, f"OMP_NUM_THREADS={threads} on {cores} core(s)"


def test_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(doctor.shutil, "disk_usage", returns(SimpleNamespace(free=5.5e9)))
        assert doctor.examine(doctor.check_disk) == ("OK", "5.5 GB free for runs/")
        patch.setattr(doctor.shutil, "disk_usage", returns(doctor.shutil._ntuple_diskusage(10**9, 10**9, 10**6)))
        assert "1 MB are free" in fix(doctor.check_disk)
        patch.setattr(doctor.shutil, "disk_usage", returns(doctor.shutil._ntuple_diskusage(10**9, 9 * 10**8, 10**8)))
        assert "100 MB are free in" in fix(doctor.check_disk), "a run wants 200"
    tmp_path.joinpath("runs").touch()  # a file where the folder should be
    assert "cannot be written" in fix(doctor.check_disk)


def test_gpus_that_this_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", returns(False))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.examine(doctor.check_gpus) == ("OK", "none: ranks compute on the CPU and talk through gloo")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices found.'\n")
    tool.chmod(0o755)
    assert doctor.examine(doctor.check_gpus)[0] == "OK", "a driver without a GPU"
    tool.write_text("#!/bin/sh\necho 'GPU 0: some GPU'\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is for the CPU" in fix(doctor.check_gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "update the driver" in fix(doctor.check_gpus)


def test_gpus_with_and_without_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", returns(True))
    monkeypatch.setattr(torch.cuda, "device_count", returns(3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100" if number else "A100")
    monkeypatch.setattr(torch.cuda.nccl, "version", returns((2, 28, 9)))
    monkeypatch.setattr(dist, "is_nccl_available", returns(True))
    assert doctor.examine(doctor.check_gpus) == ("OK", "3 (A100, H100); NCCL 2.28.9")
    monkeypatch.setattr(dist, "is_nccl_available", returns(False))
    assert "no NCCL" in fix(doctor.check_gpus)


def test_loopback(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", raises(socket.gaierror("unknown")))
        assert "does not resolve" in fix(doctor.check_loopback)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", returns("192.0.2.1"))  # an address for documentation: nobody's
        assert "resolves to 192.0.2.1" in fix(doctor.check_loopback)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", raises(TimeoutError("timed out")))
        assert "firewall" in fix(doctor.check_loopback)
    monkeypatch.setattr(socket, "if_nameindex", returns([(1, "eth0")]))
    assert "GLOO_SOCKET_IFNAME to one of eth0" in fix(doctor.check_loopback)


def test_own_name(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", returns("nowhere"))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", raises(socket.gaierror("unknown")))
        assert '"127.0.0.1 nowhere"' in fix(doctor.check_own_name)
    monkeypatch.setattr(socket, "gethostbyname", returns("192.0.2.1"))
    assert "--local_addr" in fix(doctor.check_own_name)


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_occupied_port(monkeypatch, address):
    with socket.create_server((address, 0)) as server:
        port = str(server.getsockname()[1])
        monkeypatch.setenv("PET_MASTER_PORT", port)
        text = fix(doctor.check_port)
    assert "--master_port" in text and "--standalone" in text and text.startswith(f"port {port} cannot be used")
    assert doctor.examine(doctor.check_port)[0] == "OK"
    monkeypatch.delenv("PET_MASTER_PORT")
    monkeypatch.setattr(socket, "create_server", returns(SimpleNamespace(close=returns(None))))
    assert doctor.examine(doctor.check_port) == ("OK", "29500 is free"), "the port that torchrun takes by default"


def test_what_is_in_order_is_said(monkeypatch):
    from common.vision import torchvision

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", returns(range(4)), raising=False)
    assert doctor.check_cores() == "4; OMP_NUM_THREADS is unset: torchrun takes 1"
    monkeypatch.setattr(torchvision.extension, "_has_ops", returns(True))
    assert doctor.check_torchvision() == "with its compiled operators"
    for system, interface in (("darwin", "lo0"), ("linux", "lo")):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(socket, "if_nameindex", returns([(1, interface)]))
        assert doctor.examine(doctor.check_loopback)[0] == "OK", f"the loopback interface of {system}"


def test_torch_without_libuv(monkeypatch):
    error = dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setattr(dist, "TCPStore", lambda *where, use_libuv, **how: raises(error)() if use_libuv else None)
    assert "USE_LIBUV=0" in fix(doctor.check_store)
    monkeypatch.setenv("USE_LIBUV", "0")
    assert doctor.examine(doctor.check_store) == ("OK", "TCP store without libuv"), "once it is set"
    monkeypatch.setattr(dist, "TCPStore", raises(dist.DistStoreError("nobody there")))
    assert fix(doctor.check_store) == "DistStoreError: nobody there", "which has nothing to do with libuv"


def test_gloo(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_gloo_available", returns(False))
        assert "no gloo" in fix(doctor.check_gloo)
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "sum_of_ranks", returns(1.0))
        assert "to [1.0, 1.0]" in fix(doctor.check_gloo)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert "could not sum" in fix(doctor.check_gloo)


def test_outside_of_the_virtual_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert doctor.examine(doctor.check_python)[0] == "OK"  # there is none
    (tmp_path / ".venv").mkdir()
    assert f"source {tmp_path}/.venv/bin/activate" in fix(doctor.check_python)


def test_links_that_are_text(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    (tmp_path / "course").mkdir()
    (tmp_path / "course" / "ddp").write_text("../03_ddp")
    (tmp_path / "course" / "start.py").touch()
    assert "course/ddp is a text file" in fix(doctor.check_links) and "core.symlinks true" in fix(doctor.check_links)


def test_little_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5e9))
    assert fix(doctor.check_memory).startswith("1.5 GB are free")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2.5e9))
    assert doctor.examine(doctor.check_memory) == ("OK", "2.5 GB free")


def test_no_sandbox_is_nothing_to_fix(monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: "bubblewrap (bwrap) is not installed")
    verdict, text = doctor.examine(doctor.check_sandbox)
    assert verdict == "OK" and "apt install bubblewrap" in text


def test_the_report_names_nobody(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-laptop.example.org")
    monkeypatch.setattr(socket, "getfqdn", lambda: "janes-laptop.example.org")
    run_dir = tmp_path / "runs" / "of jane"
    run_dir.mkdir(parents=True)
    config = {"steps": 3, "run_dir": "/data/jane/runs/1", "data_dir": "photos"}
    (run_dir / "config.json").write_text(json.dumps({"config": config, "torch": "2.13.0", "launch": "none_x"}))
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 2.5}\n')
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
    assert "torch 2.13.0" in text and "  steps: 3" in text, "the newest run"
    assert 'last of 2 steps: {"step": 2, "loss": 2.5}' in text
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    assert f"## machine\n{machine}\nCPython\n" in text, "the system, the architecture and the cores"
    assert "jane" not in text and "/data" not in text and "none_x" not in text
    assert "photos" not in text, "a folder with a name of its own, from here"
    assert "written: doctor-report.txt" in capsys.readouterr().out


def test_what_is_to_fix_is_counted(monkeypatch, capsys):
    def check_own_name():
        import no_such_module  # noqa: F401

    monkeypatch.setattr(doctor, "CHECKS", [check_own_name, lambda: "never mind", check_own_name])
    doctor.CHECKS[1].__name__ = "check_disk"
    assert doctor.main([]) == 2, "how many have something to fix"
    line = "FIX  own name    No module named 'no_such_module': pip install -r requirements.txt"
    assert capsys.readouterr().out.splitlines() == [line, "OK   disk        never mind", line, "2 to fix"]


def test_a_run_that_cannot_be_read_spoils_no_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctor.last_run() == ["none under runs/"]
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for content, error in (("{", "JSONDecodeError"), ("{}", "KeyError"), ('{"config": {}}', "FileNotFoundError")):
        (tmp_path / "runs" / "a" / "config.json").write_text(content)
        assert doctor.last_run() == [f"cannot be read: {error}"], content
