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
    assert [line[5:17].rstrip() for line in lines[:-1]] == [
        "python", "packages", "common", "torchvision", "jupyter", "cores", "memory", "disk", "gpus",
        "loopback", "own name", "port", "store", "gloo", "sandbox",
    ], "what others rest on stands above them"  # fmt: skip
    for line in (
        "OK   common      installed from this checkout",
        "OK   jupyter     the kernel python3 runs this Python",
        f"OK   port        {port} is free",
        "OK   store       TCP store with libuv",
        "OK   gloo        two ranks summed a number",
    ):
        assert line in lines, f"not said: {line}\n{result.stdout}"
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
    assert lines[-1][0].isdigit()


def test_every_check_is_called():
    assert set(doctor.CHECKS) == {value for name, value in vars(doctor).items() if name.startswith("check_")}


def test_a_check_that_breaks_is_reported():
    assert fix(raises(ValueError("one\ntwo"))) == "ValueError: one two"


def test_python_too_old(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert fix(doctor.check_python) == "3.9.18 is too old: make a virtual environment with Python 3.10 or newer"
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert doctor.examine(doctor.check_python) == ("OK", f"3.10.0, {sys.executable}"), "the oldest that will do"


def test_other_version(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "tqdm" else version(name))
    (pin,) = re.findall(r"^tqdm==(\S+)", (doctor.ROOT / "requirements.txt").read_text(), re.MULTILINE)
    told = f"tqdm is 9.9 instead of {pin}: pip install -r requirements.txt"
    assert fix(doctor.check_packages) == told


def test_missing_package_and_one_without_a_pin(monkeypatch, tmp_path):
    tmp_path.joinpath("requirements.txt").write_text("# some\ntorch\nno-such-package==1.0\nnone==2\n-e .\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    both = "no-such-package is missing, none is missing: pip install -r requirements.txt"
    assert fix(doctor.check_packages) == both


def test_common_from_another_checkout_or_none(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "ROOT", tmp_path)
        told = f"comes from {common.ROOT / 'common'}, another checkout: pip install -e {tmp_path}"
        assert fix(doctor.check_common) == told
    monkeypatch.setattr(doctor.subprocess, "run", returns(subprocess.CompletedProcess([], 1, stdout="")))
    assert fix(doctor.check_common) == f"not importable from other folders: pip install -e {common.ROOT}"


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


REGISTER = "python -m ipykernel install --sys-prefix"


def test_kernel_of_another_python(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    # One that is gone, and one that is there; this one, and whichever runs Jupyter.
    for python, verdict in ((tmp_path / "python", "FIX"), ("/bin/sh", "FIX"), (sys.executable, "OK"), ("python", "OK")):
        kernel = {"argv": [str(python), "-m", "ipykernel_launcher"], "display_name": "other"}
        folder.joinpath("kernel.json").write_text(json.dumps(kernel))
        told = "the kernel python3 runs this Python"
        if verdict == "FIX":
            told = f"the kernel python3 in {folder} starts {python}, not this Python: {REGISTER}"
        assert doctor.examine(doctor.check_jupyter) == (verdict, told), f"a kernel of {python}"


def test_no_kernel_and_no_jupyterlab(monkeypatch):
    from jupyter_client import kernelspec

    with monkeypatch.context() as patch:
        no_kernel = raises(kernelspec.NoSuchKernel("python3"))
        patch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", no_kernel)
        assert fix(doctor.check_jupyter) == f"there is no kernel named python3: {REGISTER}"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", returns(None))
    assert fix(doctor.check_jupyter) == "JupyterLab is missing: pip install -r requirements.txt"


def test_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", returns(range(8)), raising=False)
    for threads, told in {
        "many": "OMP_NUM_THREADS=many is no number of threads",
        "0": "OMP_NUM_THREADS=0 is no number of threads",
        "100": "2 ranks with OMP_NUM_THREADS=100 crowd 8 cores",
    }.items():
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert fix(doctor.check_cores) == f"{told}: unset it, or set it to 1: each rank is a process of its own"


def test_half_of_the_cores_for_each_of_two_ranks_is_no_crowd(monkeypatch):
    for cores, threads, verdict in ((4, "2", "OK"), (4, "3", "FIX"), (1, "1", "OK")):
        monkeypatch.setattr(os, "sched_getaffinity", returns(range(cores)), raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found, text = doctor.examine(doctor.check_cores)
        assert found == verdict, f"OMP_NUM_THREADS={threads} on {cores} core(s)"
        assert found == "FIX" or text == f"{cores}; OMP_NUM_THREADS={threads}", "cores, and the variable"


def test_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(doctor.shutil, "disk_usage", returns(SimpleNamespace(free=5.5e9)))
        assert doctor.examine(doctor.check_disk) == ("OK", "5.5 GB free for runs/")
        patch.setattr(doctor.shutil, "disk_usage", returns(doctor.shutil._ntuple_diskusage(10**9, 10**9, 10**6)))
        assert fix(doctor.check_disk) == f"1 MB are free in {tmp_path}, and runs want 200: make room"
        patch.setattr(doctor.shutil, "disk_usage", returns(doctor.shutil._ntuple_diskusage(10**9, 9 * 10**8, 10**8)))
        assert "100 MB are free in" in fix(doctor.check_disk), "a run wants 200"
    tmp_path.joinpath("runs").touch()  # a file where the folder should be
    told = f"{tmp_path}/runs cannot be written (Not a directory): make it writable, or name another with --run-dir"
    assert fix(doctor.check_disk) == told


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
    listed = f"the driver lists GPUs, but torch {torch.__version__}"
    assert fix(doctor.check_gpus) == f"{listed} is for the CPU: install a CUDA build"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert fix(doctor.check_gpus) == f"{listed} cannot use them: update the driver"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert fix(doctor.check_gpus) == f"{listed} cannot use them: update the driver", "a build for AMD's GPUs"


def test_gpus_with_and_without_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", returns(True))
    monkeypatch.setattr(torch.cuda, "device_count", returns(3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100" if number else "A100")
    monkeypatch.setattr(torch.cuda.nccl, "version", returns((2, 28, 9)))
    monkeypatch.setattr(dist, "is_nccl_available", returns(True))
    assert doctor.examine(doctor.check_gpus) == ("OK", "3 (A100, H100); NCCL 2.28.9")
    monkeypatch.setattr(dist, "is_nccl_available", returns(False))
    told = "PyTorch sees GPUs but has no NCCL: use --backend gloo, or on Linux another build of torch"
    assert fix(doctor.check_gpus) == told


def test_loopback(monkeypatch):
    line = '"127.0.0.1 localhost"'
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", raises(socket.gaierror("unknown")))
        told = f"the name localhost does not resolve: add the line {line} to the hosts file"
        assert fix(doctor.check_loopback) == told
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", returns("192.0.2.1"))  # an address for documentation: nobody's
        told = f"localhost resolves to 192.0.2.1: the hosts file should have the line {line}"
        assert fix(doctor.check_loopback) == told
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", raises(TimeoutError("timed out")))
        told = "no connection to 127.0.0.1 (timed out): is a firewall in the way?"
        assert fix(doctor.check_loopback) == told
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(socket, "if_nameindex", returns([(1, "eth0"), (2, "wlan0")]))
    told = "there is no interface lo: set GLOO_SOCKET_IFNAME to one of eth0, wlan0"
    assert fix(doctor.check_loopback) == told
    monkeypatch.setattr(sys, "platform", "win32")
    assert doctor.examine(doctor.check_loopback) == ("OK", "localhost is 127.0.0.1"), "Windows names none"


def test_own_name(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", returns("nowhere"))
    told = (
        'this machine cannot be reached by its own name: add the line "127.0.0.1 nowhere" to the hosts file, or start '
        "with torchrun --local_addr=localhost"
    )
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostbyname", raises(socket.gaierror("unknown")))
        assert fix(doctor.check_own_name) == told
    monkeypatch.setattr(socket, "gethostbyname", returns("192.0.2.1"))
    assert fix(doctor.check_own_name) == told, "somebody else's address"
    monkeypatch.setattr(socket, "gethostbyname", returns("127.0.0.1"))
    assert doctor.examine(doctor.check_own_name) == ("OK", "nowhere is 127.0.0.1")


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_occupied_port(monkeypatch, address):
    with socket.create_server((address, 0)) as server:
        port = str(server.getsockname()[1])
        monkeypatch.setenv("PET_MASTER_PORT", port)
        text = fix(doctor.check_port)
    advice = "on one node start with torchrun --standalone, on several give another port on every node"
    assert text.startswith(f"port {port} cannot be used (Address already in use"), text
    assert text.endswith(f"): {advice}: --master_port=PORT"), text
    assert doctor.examine(doctor.check_port) == ("OK", f"{port} is free")
    monkeypatch.delenv("PET_MASTER_PORT")
    monkeypatch.setattr(socket, "create_server", returns(SimpleNamespace(close=returns(None))))
    assert doctor.examine(doctor.check_port) == ("OK", "29500 is free"), "the port that torchrun takes by default"


def test_torch_without_libuv(monkeypatch):
    error = dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setattr(dist, "TCPStore", lambda *where, use_libuv, **how: raises(error)() if use_libuv else None)
    told = "this build of torch lacks libuv: set the environment variable USE_LIBUV=0"
    assert fix(doctor.check_store) == told
    monkeypatch.setenv("USE_LIBUV", "0")
    assert doctor.examine(doctor.check_store) == ("OK", "TCP store without libuv"), "once it is set"
    monkeypatch.setattr(dist, "TCPStore", raises(dist.DistStoreError("nobody there")))
    assert fix(doctor.check_store) == "DistStoreError: nobody there", "which has nothing to do with libuv"


def test_gloo(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_gloo_available", returns(False))
        told = "this build of torch has no gloo: install the usual one with pip install -r requirements.txt"
        assert fix(doctor.check_gloo) == told
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "sum_of_ranks", returns(1.0))
        again = "reinstall torch with pip install -r requirements.txt --force-reinstall"
        assert fix(doctor.check_gloo) == f"two ranks summed 1 and 2 to [1.0, 1.0]: {again}"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert re.fullmatch(
        r"two ranks could not sum a number \(rank \d of 2: .*nosuch0.*\): mend what stands above first; then unset "
        r"variables such as GLOO_SOCKET_IFNAME, and look for a firewall",
        fix(doctor.check_gloo),
    ), "what to do where ranks cannot meet: the variable is gloo's"


def test_outside_of_the_virtual_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert doctor.examine(doctor.check_python)[0] == "OK"  # there is none
    (tmp_path / ".venv").mkdir()
    own = f"{sys.executable} is not that of the virtual environment"
    assert fix(doctor.check_python) == f"{own}: source {tmp_path}/.venv/bin/activate"


def test_little_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5e9))
    told = "1.5 GB are free, and two ranks with a notebook want 2: close what you do not need"
    assert fix(doctor.check_memory) == told
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2.5e9))
    assert doctor.examine(doctor.check_memory) == ("OK", "2.5 GB free")
