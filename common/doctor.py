"""Is this machine ready for the course?

    python -m common.doctor
    python -m common.doctor --report
    python -m common.doctor --symptom "it hangs at the end of an epoch"

prints a line per check, OK or FIX with what to do, and exits with 0 when there is nothing to fix, else with 1. With
--report it also writes these lines, the versions, the machine and the last run into doctor-report.txt, without names
and paths: what a bug report begins with. With --symptom it checks nothing, and says where the course explains that.
It is for installations that are broken: whatever may be missing is imported inside the check that needs it.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL = "pip install -r requirements.txt"


class Fix(Exception):
    """What is wrong, and what to do about it."""


def check_python():
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 10):  # noqa: UP036  this file runs where the course cannot
        raise Fix(f"{version} is too old: make a virtual environment with Python 3.10 or newer")
    if (ROOT / ".venv").exists() and sys.prefix == sys.base_prefix:
        raise Fix(f"{sys.executable} is not that of the virtual environment: source {ROOT / '.venv'}/bin/activate")
    return f"{version}, {sys.executable}"


def pinned(text):
    """{name: version, or None where any will do} of the requirements that hold for this Python."""
    pins = {}
    for line in text.splitlines():
        requirement, _, marker = line.partition(";")
        found = re.match(r"([\w-]+)(?:==(\S+))?", requirement.strip())
        if not found or line.startswith(("#", "-")):
            continue
        # The only marker in use; `packaging` could read them all, but may be missing here.
        condition = re.match(r'\s*python_version (<|>=) "3\.(\d+)"', marker)
        if not condition or (sys.version_info < (3, int(condition[2]))) == (condition[1] == "<"):
            pins[found[1]] = found[2]
    return pins


def check_packages():
    pins, wrong = pinned((ROOT / "requirements.txt").read_text()), []
    for name, version in pins.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if version and installed.split("+")[0] != version:  # what follows + is the build: cpu, cu130
            wrong.append(f"{name} is {installed} instead of {version}")
    if wrong:
        raise Fix(f"{', '.join(wrong)}: {INSTALL}")
    return f"all {len(pins)} of requirements.txt"


def check_common():
    # Notebooks and the chapters' scripts do not start in this folder: what do they import?
    command = [sys.executable, "-c", "import common; print(common.__file__)"]
    with tempfile.TemporaryDirectory() as elsewhere:
        found = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True).stdout.strip()
    if not found:
        raise Fix(f"not importable from other folders: pip install -e {ROOT}")
    if Path(found).resolve().parent != ROOT / "common":
        raise Fix(f"comes from {Path(found).parent}, another checkout: pip install -e {ROOT}")
    return "installed from this checkout"


def check_torchvision():
    from common.vision import torchvision

    if torchvision.extension._has_ops():
        return "with its compiled operators"
    return "without its compiled operators, which do not fit this build of torch; the course needs none of them"


def check_jupyter():
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    if not importlib.util.find_spec("jupyterlab"):
        raise Fix(f"JupyterLab is missing: {INSTALL}")
    register = "python -m ipykernel install --sys-prefix"
    try:
        kernel = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        raise Fix(f"there is no kernel named python3: {register}") from None
    python = kernel.argv[0]
    # A bare "python" stands for the Python that runs Jupyter.
    if os.path.isabs(python) and not (os.path.exists(python) and os.path.samefile(python, sys.executable)):
        raise Fix(f"the kernel python3 in {kernel.resource_dir} starts {python}, not this Python: {register}")
    return "the kernel python3 runs this Python"


def check_loopback():
    try:
        address = socket.gethostbyname("localhost")
    except OSError:
        raise Fix('the name localhost does not resolve: add the line "127.0.0.1 localhost" to the hosts file') from None
    if not address.startswith("127."):
        raise Fix(f'localhost resolves to {address}: the hosts file should have the line "127.0.0.1 localhost"')
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        raise Fix(f"no connection to {address} ({error}): is a firewall in the way?") from None
    interface = "lo0" if sys.platform == "darwin" else "lo"
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names and sys.platform != "win32":
        raise Fix(f"there is no interface {interface}: set GLOO_SOCKET_IFNAME to one of {', '.join(names)}")
    return f"localhost is {address}"


def check_own_name():
    # torchrun on one node, and gloo without an interface name, meet at this address.
    name = socket.getfqdn()
    try:
        address = socket.gethostbyname(name)
        socket.create_server((address, 0)).close()
    except OSError:
        raise Fix(
            f'this machine cannot be reached by its own name: add the line "127.0.0.1 {name}" to the hosts file, '
            f"or start with torchrun --local_addr=localhost"
        ) from None
    return f"{name} is {address}"


def check_port():
    port = int(os.environ.get("PET_MASTER_PORT", 29500))  # what torchrun reads
    try:
        # On all addresses of this machine, as the store will be.
        if socket.has_dualstack_ipv6():
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("", port)).close()
    except OSError as error:
        raise Fix(
            f"port {port} cannot be used ({error.strerror}): on one node start with torchrun --standalone, "
            f"on several give another port on every node: --master_port=PORT"
        ) from None
    return f"{port} is free"


def check_cores():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    advice = "unset it, or set it to 1: each rank is a process of its own"
    if threads is None:
        return f"{cores}; OMP_NUM_THREADS is unset: torchrun takes 1"
    if not threads.isdigit() or int(threads) < 1:
        raise Fix(f"OMP_NUM_THREADS={threads} is no number of threads: {advice}")
    if int(threads) > max(1, cores // 2):
        raise Fix(f"2 ranks with OMP_NUM_THREADS={threads} crowd {cores} cores: {advice}")
    return f"{cores}; OMP_NUM_THREADS={threads}"


def check_memory():
    import psutil

    free = psutil.virtual_memory().available / 1e9
    if free < 2:
        raise Fix(f"{free:.1f} GB are free, and two ranks with a notebook want 2: close what you do not need")
    return f"{free:,.1f} GB free"


def check_sandbox():
    from common.grading.sandbox import available

    missing = available()
    if missing:
        return f"none, for {missing}; only who grades a class needs one: apt install bubblewrap"
    return "bubblewrap: submissions of a class are graded in it"


def check_gpus():
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            raise Fix("PyTorch sees GPUs but has no NCCL: use --backend gloo, or on Linux another build of torch")
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return f"{len(names)} ({', '.join(sorted(set(names)))}); NCCL {version}"
    if driver_lists_gpus():
        if torch.version.cuda is None and torch.version.hip is None:
            raise Fix(f"the driver lists GPUs, but torch {torch.__version__} is for the CPU: install a CUDA build")
        raise Fix(f"the driver lists GPUs, but torch {torch.__version__} cannot use them: update the driver")
    return "none: ranks compute on the CPU and talk through gloo"


def driver_lists_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU 0" in listed.stdout


def check_store():
    import torch.distributed as dist

    libuv = os.environ.get("USE_LIBUV", "1") == "1"
    try:
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    except dist.DistStoreError as error:
        if "libuv" not in str(error):
            raise
        raise Fix("this build of torch lacks libuv: set the environment variable USE_LIBUV=0") from None
    return "TCP store with libuv" if libuv else "TCP store without libuv"


def check_gloo():
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise Fix(f"this build of torch has no gloo: install the usual one with {INSTALL}")
    from common.lab.launch import RankFailed, launch

    try:
        sums = launch(sum_of_ranks, nproc=2, timeout=60)
    except RankFailed as error:
        raise Fix(
            f"two ranks could not sum a number ({str(error).splitlines()[0]}): mend what stands above first; "
            f"then unset variables such as GLOO_SOCKET_IFNAME, and look for a firewall"
        ) from None
    if sums != [3.0, 3.0]:
        raise Fix(f"two ranks summed 1 and 2 to {sums}: reinstall torch with {INSTALL} --force-reinstall")
    return "two ranks summed a number"


def sum_of_ranks():
    import torch
    import torch.distributed as dist

    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    return number.item()


def check_disk():
    folder = Path("runs") if Path("runs").exists() else Path()
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Fix(
            f"{folder.resolve()} cannot be written ({error.strerror}): make it writable, or name another with --run-dir"
        ) from None
    free = shutil.disk_usage(folder).free / 1e6
    if free < 200:
        raise Fix(f"{free:.0f} MB are free in {folder.resolve()}, and runs want 200: make room")
    return f"{free / 1e3:,.1f} GB free for runs/"


CHECKS = [
    check_python,
    check_packages,
    check_common,
    check_torchvision,
    check_jupyter,
    check_cores,
    check_memory,
    check_disk,
    check_gpus,
    check_loopback,
    check_own_name,
    check_port,
    check_store,
    check_gloo,
    check_sandbox,
]


def examine(check):
    """("OK" or "FIX", what the check found, in one line)."""
    try:
        return "OK", check()
    except Fix as fix:
        return "FIX", str(fix)
    except ImportError as error:
        return "FIX", f"{error}: {INSTALL}"
    except Exception as error:  # a doctor who faints helps nobody
        return "FIX", f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- a report -------------------------------------------------------------------------------------------------


def report(lines):
    """What a bug report begins with: the checks, versions, machine and last run, without names and paths."""
    versions = []
    for name in sorted(pinned((ROOT / "requirements.txt").read_text())):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} is missing")
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    parts = {"checks": lines, "machine": [machine, platform.python_implementation()], "versions": versions}
    parts["last run"] = last_run()
    text = "\n\n".join(f"## {title}\n" + "\n".join(content) for title, content in parts.items())
    return anonymous(f"# Report of python -m common.doctor\n\n{text}\n")


def last_run():
    """Settings and last metrics of the newest run under runs/, in lines."""
    found = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        return ["none under runs/"]
    from common.errors import UserError  # not at the top: this file runs where the course cannot

    try:
        from common import stored

        facts, records = stored.facts_of(found[-1].parent), stored.records_of(found[-1].parent)
    except (ImportError, UserError) as error:
        return [f"cannot be read: {error}"]
    names = ("strategy", "implementation", "mesh", "world_size", "torch", "python")
    lines = [f"{name}: {getattr(facts, name)}" for name in names]
    lines += [f"  {key}: {value}" for key, value in facts.config.items() if not key.endswith("_dir")]
    lines.append(f"last of {len(records)} steps: {json.dumps(records[-1]) if records else 'none'}")
    return [stored.printable(line) for line in lines]


def anonymous(text):
    """Without the names of the user and the machine, addresses, and paths."""
    text = text.replace(str(ROOT), "COURSE").replace(str(Path.home()), "HOME")
    text = re.sub(r"(?<![\w/])/(?:[^\s/:,;()'\"]+/)+[^\s/:,;()'\"]*", "PATH", text)
    text = re.sub(r"\b(?!127\.)\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", text)
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().split(".")[0]} - {"localhost"}
    names |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME")}
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "NAME", text)
    return text


class Parser(argparse.ArgumentParser):
    """As common.errors has it, which a broken installation may not be able to import."""

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the options)\n")


def main(arguments=None):
    """Print a line per check; return how many have something to fix."""
    parser = Parser("python -m common.doctor", description="Is this machine ready for the course?")
    parser.add_argument("--report", action="store_true", help="also write doctor-report.txt, without names and paths")
    parser.add_argument("--symptom", metavar="WORDS", help="check nothing; say where the course explains this")
    options = parser.parse_args(arguments)
    if options.symptom is not None and not options.symptom.strip():
        parser.error("--symptom is empty; give it words of the message, or of what you see")
    if options.symptom is not None:
        from common import symptoms

        print(symptoms.answer(options.symptom))
        return 0
    to_fix, lines = 0, []
    for check in CHECKS:
        verdict, text = examine(check)
        to_fix += verdict == "FIX"
        name = check.__name__[len("check_") :].replace("_", " ")
        lines.append(f"{verdict:<4} {name:<12}{text}")
        print(lines[-1], flush=True)
    print(f"{to_fix} to fix" if to_fix else "all OK")
    if options.report:
        try:
            Path("doctor-report.txt").write_text(report(lines))
        except OSError as error:
            parser.exit(2, f"error: doctor-report.txt cannot be written here: {error.strerror}; start it elsewhere\n")
        print("written: doctor-report.txt; read it before you send it")
    return to_fix


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
