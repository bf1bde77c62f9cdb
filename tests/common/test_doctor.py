"""The doctor finds nothing on a healthy machine, and each planted fault."""

import importlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

import common
from common import doctor


def run(*options, **environment):
    command = [sys.executable, *options, "-m", "common.doctor"]
    return subprocess.run(command, cwd=doctor.ROOT, env=os.environ | environment, capture_output=True, text=True)


def fix(check, *words):
    """The check says in one line what is to fix, with each of these words."""
    verdict, text = doctor.examine(check)
    assert verdict == "FIX", f"not noticed: {text}"
    assert "\n" not in text and not [word for word in words if word not in text], text


def well(check, *words):
    verdict, text = doctor.examine(check)
    assert verdict == "OK" and not [word for word in words if word not in text], f"{verdict} {text}"


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
    names = [line[5:17].rstrip() for line in lines[:-1]]
    assert names.index("packages") < names.index("torchvision") < names.index("gloo"), "what others rest on comes first"
    assert str(port) in lines[names.index("port")] and result.returncode == 0


def test_without_any_package_there_is_advice_and_no_traceback():
    result = run("-S")  # no site-packages
    lines = result.stdout.splitlines()
    assert result.returncode == 1
    assert result.stderr == ""
    assert len(lines) == len(doctor.CHECKS) + 1
    assert "torch is missing" in result.stdout
    (gloo,) = [line for line in lines if line.startswith("FIX  gloo")]
    assert "No module named 'torch'" in gloo and "pip install -r requirements.txt" in gloo


def test_every_check_is_called():
    assert set(doctor.CHECKS) == {value for name, value in vars(doctor).items() if name.startswith("check_")}


def test_a_check_that_breaks_is_reported():
    fix(raises(ValueError("one\ntwo")), "ValueError", "one", "two")


def test_python_too_old(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    fix(doctor.check_python, "3.9.18", "3.10")
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    well(doctor.check_python, "3.10.0", sys.executable)  # the oldest that will do


def test_other_version(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "tqdm" else version(name))
    (pin,) = re.findall(r"^tqdm==(\S+)", (doctor.ROOT / "requirements.txt").read_text(), re.MULTILINE)
    fix(doctor.check_packages, "tqdm", "9.9", pin, "pip install -r requirements.txt")


def test_missing_package_and_one_without_a_pin(monkeypatch, tmp_path):
    tmp_path.joinpath("requirements.txt").write_text("# some\ntorch\nno-such-package==1.0\nnone==2\n-e .\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    fix(doctor.check_packages, "no-such-package", "none", "pip install -r requirements.txt")


def test_common_from_another_checkout_or_none(monkeypatch, tmp_path):
    """As programs of other folders see it: where the doctor is started, a folder of that name may lie."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    well(doctor.check_common)
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "ROOT", tmp_path)
        fix(doctor.check_common, str(common.ROOT / "common"), f"pip install -e {tmp_path}")
    monkeypatch.setattr(doctor.subprocess, "run", returns(subprocess.CompletedProcess([], 1, stdout="")))
    fix(doctor.check_common, f"pip install -e {common.ROOT}")


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
    fix(doctor.check_torchvision, "different CUDA")


REGISTER = "python -m ipykernel install --sys-prefix"


def test_kernel_of_another_python(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    # One that is gone, and one that is there; this one, and whichever runs Jupyter.
    for python, verdict in ((tmp_path / "python", "FIX"), ("/bin/sh", "FIX"), (sys.executable, "OK"), ("python", "OK")):
        kernel = {"argv": [str(python), "-m", "ipykernel_launcher"], "display_name": "other"}
        folder.joinpath("kernel.json").write_text(json.dumps(kernel))
        if verdict == "FIX":
            fix(doctor.check_jupyter, str(folder), str(python), REGISTER)
        else:
            well(doctor.check_jupyter)


def test_no_kernel_and_no_jupyterlab(monkeypatch):
    from jupyter_client import kernelspec

    with monkeypatch.context() as patch:
        no_kernel = raises(kernelspec.NoSuchKernel("python3"))
        patch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", no_kernel)
        fix(doctor.check_jupyter, "python3", REGISTER)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", returns(None))
    fix(doctor.check_jupyter, "JupyterLab", "pip install -r requirements.txt")


def test_threads(monkeypatch):
    """Half of the cores for each of two ranks is no crowd."""
    for cores, threads, verdict in (
        (8, "many", "FIX"), (8, "0", "FIX"), (8, "100", "FIX"), (4, "2", "OK"), (4, "3", "FIX"), (1, "1", "OK")
    ):  # fmt: skip
        monkeypatch.setattr(os, "sched_getaffinity", returns(range(cores)), raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found, text = doctor.examine(doctor.check_cores)
        assert found == verdict, f"OMP_NUM_THREADS={threads} on {cores} core(s): {text}"
        assert f"OMP_NUM_THREADS={threads}" in text and (str(cores) in text or threads in ("many", "0")), text


def test_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(doctor.shutil, "disk_usage", returns(SimpleNamespace(free=5.5e9)))
        well(doctor.check_disk, "5.5 GB")
        patch.setattr(doctor.shutil, "disk_usage", returns(doctor.shutil._ntuple_diskusage(10**9, 10**9, 10**6)))
        fix(doctor.check_disk, "1 MB", str(tmp_path), "200")
        patch.setattr(doctor.shutil, "disk_usage", returns(doctor.shutil._ntuple_diskusage(10**9, 9 * 10**8, 10**8)))
        fix(doctor.check_disk, "100 MB")
    tmp_path.joinpath("runs").touch()  # a file where the folder should be
    fix(doctor.check_disk, f"{tmp_path}/runs", "Not a directory", "--run-dir")


def test_gpus_that_this_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", returns(False))
    monkeypatch.setenv("PATH", str(tmp_path))
    well(doctor.check_gpus, "CPU", "gloo")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices found.'\n")
    tool.chmod(0o755)
    well(doctor.check_gpus)  # a driver without a GPU
    tool.write_text("#!/bin/sh\necho 'GPU 0: some GPU'\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    fix(doctor.check_gpus, torch.__version__, "CUDA build")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fix(doctor.check_gpus, torch.__version__, "update the driver")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    fix(doctor.check_gpus, "update the driver")  # a build for AMD's GPUs


def test_gpus_with_and_without_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", returns(True))
    monkeypatch.setattr(torch.cuda, "device_count", returns(3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100" if number else "A100")
    monkeypatch.setattr(torch.cuda.nccl, "version", returns((2, 28, 9)))
    monkeypatch.setattr(dist, "is_nccl_available", returns(True))
    well(doctor.check_gpus, "3", "A100", "H100", "NCCL 2.28.9")
    monkeypatch.setattr(dist, "is_nccl_available", returns(False))
    fix(doctor.check_gpus, "NCCL", "--backend gloo")


def test_loopback(monkeypatch):
    line = '"127.0.0.1 localhost"'
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", raises(socket.gaierror("unknown")))
        fix(doctor.check_loopback, "localhost", line)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", returns("192.0.2.1"))  # an address for documentation: nobody's
        fix(doctor.check_loopback, "localhost", "192.0.2.1", line)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", raises(TimeoutError("timed out")))
        fix(doctor.check_loopback, "127.0.0.1", "timed out", "firewall")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(socket, "if_nameindex", returns([(1, "eth0"), (2, "wlan0")]))
    fix(doctor.check_loopback, "GLOO_SOCKET_IFNAME", "eth0, wlan0")
    monkeypatch.setattr(sys, "platform", "win32")
    well(doctor.check_loopback, "127.0.0.1")  # Windows names none


def test_own_name(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", returns("nowhere"))
    words = '"127.0.0.1 nowhere"', "torchrun --local_addr=localhost"
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", raises(socket.gaierror("unknown")))
        fix(doctor.check_own_name, *words)
    monkeypatch.setattr(socket, "gethostbyname", returns("192.0.2.1"))
    fix(doctor.check_own_name, *words)  # somebody else's address
    monkeypatch.setattr(socket, "gethostbyname", returns("127.0.0.1"))
    well(doctor.check_own_name, "nowhere", "127.0.0.1")


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_occupied_port(monkeypatch, address):
    with socket.create_server((address, 0)) as server:
        port = str(server.getsockname()[1])
        monkeypatch.setenv("PET_MASTER_PORT", port)
        fix(doctor.check_port, port, "Address already in use", "torchrun --standalone", "--master_port=")
    well(doctor.check_port, port)
    monkeypatch.delenv("PET_MASTER_PORT")
    monkeypatch.setattr(socket, "create_server", returns(SimpleNamespace(close=returns(None))))
    well(doctor.check_port, "29500")  # the port that torchrun takes by default


def test_torch_without_libuv(monkeypatch):
    error = dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setattr(dist, "TCPStore", lambda *where, use_libuv, **how: raises(error)() if use_libuv else None)
    fix(doctor.check_store, "USE_LIBUV=0")
    monkeypatch.setenv("USE_LIBUV", "0")
    well(doctor.check_store, "without libuv")  # once it is set
    monkeypatch.setattr(dist, "TCPStore", raises(dist.DistStoreError("nobody there")))
    fix(doctor.check_store, "DistStoreError", "nobody there")  # which has nothing to do with libuv


def test_gloo(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_gloo_available", returns(False))
        fix(doctor.check_gloo, "gloo", "pip install -r requirements.txt")
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "sum_of_ranks", returns(1.0))
        fix(doctor.check_gloo, "[1.0, 1.0]", "pip install -r requirements.txt --force-reinstall")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    fix(doctor.check_gloo, "nosuch0", "GLOO_SOCKET_IFNAME", "firewall")


def test_outside_of_the_virtual_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert doctor.examine(doctor.check_python)[0] == "OK"  # there is none
    (tmp_path / ".venv").mkdir()
    fix(doctor.check_python, sys.executable, f"source {tmp_path}/.venv/bin/activate")


def test_little_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5e9))
    fix(doctor.check_memory, "1.5 GB", "2")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2.5e9))
    well(doctor.check_memory, "2.5 GB")
