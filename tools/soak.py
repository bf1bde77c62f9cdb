"""Run every shipped script and notebook many times over and count what failed: the aim is nothing.

    python tools/soak.py

A run fails when its exit code is not 0, when it is not done in time, or when it leaves a process behind. The first run
of each row of a chapter's script is a process as readers start it; the others are forks of this one (tests/forks.py),
which saves them three seconds of imports. But a fork doesn't end as Python does. The programs to copy are processes of
their own in every run. Exit code 0 when nothing failed.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import forks
import psutil

ROOT = Path(__file__).resolve().parent.parent
SCRIPT_RUNS, NOTEBOOK_RUNS = 20, 5
RANKS = (1, 2, 3, 4)
TIMEOUT, GRACE = 180, 5  # seconds for a run, and for its last processes to end
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = "--steps 3 --layers 1 --width 32 --heads 2 --context 32 --batch-size 36"  # 36 = 4 ranks x 3 x 3

# (folder, options) of each script, which is its distributed_training.py
SCRIPTS = [
    (".", ""),
    (".", "--task images"),
    ("01_intro", ""),
    ("02_data_parallel", ""),
    ("02_data_parallel", "--by-hand --accumulation-steps 3"),
    ("03_ddp", ""),
    ("03_ddp", "--by-hand"),
    ("03_ddp", "--accumulation-steps 3 --check-collectives"),
    ("03_ddp", "--loading dispatch"),
    ("03_ddp", "--loading shard-stream-workers"),
    ("04_model_parallel", "--strategy model"),
    ("04_model_parallel", "--strategy model --by-hand --layers 2 --accumulation-steps 3"),
    ("04_model_parallel", "--strategy expert --by-hand --experts 12 --accumulation-steps 3"),
    ("04_model_parallel", "--heads 4 --accumulation-steps 3"),
    ("04_model_parallel", "--strategy sequence --by-hand --heads 4"),
    ("04_model_parallel", "--strategy context --by-hand --accumulation-steps 3 --context 48"),
    ("04_model_parallel", "--strategy ulysses --by-hand --heads 12 --width 48 --context 48"),
    ("05_pipeline", "--layers 6"),
    ("05_pipeline", "--layers 6 --schedule interleaved --accumulation-steps 3"),
    ("05_pipeline", "--layers 6 --by-hand --schedule zbv --accumulation-steps 3 --check-collectives"),
    ("06_fsdp", "--accumulation-steps 3 --recompute selective"),
    ("06_fsdp", "--by-hand --layers 3 --accumulation-steps 3 --check-collectives"),
    ("06_fsdp", "--strategy zero1"),
    ("06_fsdp", "--strategy zero2 --by-hand"),
]
GRIDS = [  # on four ranks
    ("05_pipeline", "--strategy pipeline+ddp --mesh data=2 --microbatches 3"),
    ("05_pipeline", "--strategy pipeline+ddp --mesh data=2 --microbatches 3 --by-hand --schedule zb-h1"),
    ("05_pipeline", "--strategy pipeline+fsdp --mesh shard=2 --microbatches 3"),
    ("06_fsdp", "--strategy hsdp --mesh data=2,shard=2"),
    ("06_fsdp", "--strategy hsdp --by-hand"),
    ("06_fsdp", "--strategy tensor+fsdp --mesh shard=2,tensor=2"),
    (".", "--mesh data=2,tensor=2"),
    (".", "--mesh data=2,tensor=2 --by-hand"),
    (".", "--mesh pipeline=2,tensor=2 --microbatches 3 --by-hand"),
    (".", "--mesh data=2,context=2 --by-hand"),
    (".", "--mesh data=2,expert=2 --by-hand --experts 4"),
]

PROGRAMS = {  # to copy: their arguments
    "01_intro/standalone.py": "",
    "02_data_parallel/standalone.py": "1",
    "03_ddp/standalone.py": "1",
    "03_ddp/feeding.py": "",
    "03_ddp/speed.py": "256",
    "04_model_parallel/standalone.py": "1",
    "04_model_parallel/standalone_layers.py": "",
    "05_pipeline/standalone.py": "1",
    "06_fsdp/standalone.py": "1",
}


def attempt(command, folder, timeout=TIMEOUT):
    """Run a command in a folder; what went wrong, or "" where nothing did. Ends what it left behind.

    command: a list of words, or a function that is given a folder and starts a Fork there
    """
    mark = uuid.uuid4().hex  # every descendant of a command inherits it, in whatever session or process group it is
    with tempfile.TemporaryFile("w+") as output:
        if callable(command):
            process = command(folder)
        else:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "SOAK": mark}
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        family, deadline = set(), time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.Error):
                family |= set(psutil.Process(process.pid).children(recursive=True))  # a fork has its parent's marks
            time.sleep(0.05)
        code = process.poll()
        wrong = [f"not done in {timeout} s"] if code is None else [f"exit code {code}"] if code else []
        _, left = psutil.wait_procs({*family, *marked(mark)}, timeout=0 if wrong else GRACE)
        for other in left:
            if not wrong:
                wrong.append(f"left process {other.pid} behind")
            with contextlib.suppress(psutil.Error):
                other.kill()
        if code is None:
            with contextlib.suppress(psutil.Error):
                psutil.Process(process.pid).kill()
            process.wait(GRACE)
        psutil.wait_procs(left, timeout=1)
        output.seek(0)
        said = "".join(process.communicate(GRACE)) if callable(command) else output.read()
        return "\n".join([*wrong, *said.splitlines()[-30:]]) if wrong else ""


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SOAK") == mark:
                found.append(process)
        except psutil.Error:  # somebody else's, or gone
            continue
    return found


def script(options, ranks, run_dir, fork=False):
    """What starts a script: a command, or a function that forks torchrun."""
    words = [f"--nproc_per_node={ranks}", "distributed_training.py", "--distributed"]
    words += [*SMALL.split(), *options.split(), "--run-dir", run_dir]
    if fork:
        return lambda folder: forks.torchrun("--standalone", *words, cwd=folder)
    return [*TORCHRUN, *words]


def notebook(path):
    options = "--nbval --nbval-current-env --nbval-cell-timeout 120 -q -p no:cacheprovider"
    return [sys.executable, "-m", "pytest", *options.split(), path]


def soak(name, runs, make_command, folder):
    """Print a row of the table and the first failure; return how many of the runs failed.

    make_command(folder for the run, number of the run); it runs in `folder`, or if that is None in the run's
    """
    failures = []
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="soak-") as run_dir:
            failures.append(attempt(make_command(run_dir, number), folder or run_dir))
    failures = [failure for failure in failures if failure]
    print(f"{name:<80}{runs:>5}{len(failures):>8}", flush=True)
    if failures:
        print("  " + failures[0].replace("\n", "\n  "), flush=True)
    return len(failures)


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # it has no options
    print(f"{'':<80}{'runs':>5}{'failed':>8}")
    failed = 0
    rows = [(*row, ranks) for row in SCRIPTS for ranks in RANKS] + [(*row, 4) for row in GRIDS]
    for folder, options, ranks in rows:
        if ranks == 3 and "--heads 4" in options:
            continue  # strategies that cut the heads and a vocabulary of 256
        name = f"{Path(folder, 'distributed_training.py')} {options}".strip() + f", {ranks} rank(s)"

        def start(run_dir, number, options=options, ranks=ranks):
            return script(options, ranks, run_dir, fork=number > 0)

        failed += soak(name, SCRIPT_RUNS, start, ROOT / folder)
    for program, arguments in PROGRAMS.items():
        for ranks in (1, 2, 4) if "init_process_group" in (ROOT / program).read_text() else (1,):
            command = [*TORCHRUN, f"--nproc_per_node={ranks}", ROOT / program, *arguments.split()]
            row = f"{program} {arguments}".strip() + f", {ranks} rank(s)"
            failed += soak(row, SCRIPT_RUNS, lambda run_dir, number, command=command: command, None)
    for path in sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("0*/*.ipynb")):
        failed += soak(path, NOTEBOOK_RUNS, lambda run_dir, number, path=path: notebook(path), ROOT)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
