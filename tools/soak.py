"""Run every shipped script and notebook many times over and count what failed: the aim is nothing.

    python tools/soak.py

A run fails when its exit code is not 0, when it is not done in time, or when it leaves a process behind. The first run
of each row of a chapter's script is a process as readers start it; the others are forks of this one (tests/forks.py),
which saves them three seconds of imports. But a fork doesn't end as Python does. The programs to copy are processes of
their own in every run. Exit code 0 when nothing failed.
"""

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

from common.errors import Parser
from course.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
SCRIPT_RUNS, NOTEBOOK_RUNS = 20, 5
RANKS = (1, 2, 3, 4)
TIMEOUT, GRACE = 180, 5  # seconds for a run, and for its last processes to end
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = "--steps 3 --layers 4 --width 32 --heads 4 --context 32 --batch-size 72"  # 72 = 4 ranks x 3 x 3 x 2

# Options that no line of the table of strategies has: (folder of the script, options, on how many ranks).
MORE = [
    (".", "--task images", RANKS),
    ("02_data_parallel", "--by-hand --accumulation-steps 3", RANKS),
    ("03_ddp", "--accumulation-steps 3 --check-collectives", RANKS),
    ("03_ddp", "--loading dispatch", RANKS),
    ("03_ddp", "--loading shard-stream-workers", RANKS),
    ("04_model_parallel", "--strategy model --by-hand --accumulation-steps 3", RANKS),
    ("04_model_parallel", "--strategy expert --by-hand --experts 12 --accumulation-steps 3", RANKS),
    ("05_pipeline", "--layers 6 --schedule interleaved --accumulation-steps 3 --microbatches 3", (1, 2, 3)),
    ("05_pipeline", "--layers 8 --by-hand --schedule zbv --check-collectives", RANKS),
    ("06_fsdp", "--accumulation-steps 3 --recompute selective", RANKS),
    ("06_fsdp", "--by-hand --layers 3 --accumulation-steps 3 --check-collectives", RANKS),
    (".", "--mesh data=2,tensor=2", (4,)),
    (".", "--mesh data=2,tensor=2 --by-hand", (4,)),
    (".", "--mesh pipeline=2,tensor=2 --by-hand", (4,)),
    (".", "--mesh data=2,context=2 --by-hand", (4,)),
    (".", "--mesh data=2,expert=2 --by-hand --experts 4", (4,)),
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
        printed = "".join(process.communicate(GRACE)) if callable(command) else output.read()
        return "\n".join([*wrong, *printed.splitlines()[-30:]]) if wrong else ""


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


def rows():
    """(folder, options, ranks) of each run of a script: every implementation of every strategy, on as many ranks as it
    is proved on, and what else there is."""
    for name, entry in STRATEGIES.items():
        for kind in entry.implementations if name != "mesh" else ():  # which wants a --mesh: below
            for ranks in entry.sizes(kind):
                yield entry.chapter, f"--strategy {name} --implementation {kind}", ranks
    yield from ((folder, options, ranks) for folder, options, sizes in MORE for ranks in sizes)


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
    Parser(description=__doc__.splitlines()[0]).asked()  # it has no options
    print(f"{'':<80}{'runs':>5}{'failed':>8}")
    failed = 0
    for folder, options, ranks in rows():
        name = f"{Path(folder, 'distributed_training.py')} {options}".strip() + f", {ranks} rank(s)"

        def start(run_dir, number, options=options, ranks=ranks):
            return script(options, ranks, run_dir, fork=number > 0)

        failed += soak(name, SCRIPT_RUNS, start, ROOT / folder)
    for program, arguments in PROGRAMS.items():
        for ranks in (1, 2, 4) if "init_process_group" in (ROOT / program).read_text() else (1,):
            command = [*TORCHRUN, f"--nproc_per_node={ranks}", ROOT / program, *arguments.split()]
            row = f"{program} {arguments}".strip() + f", {ranks} rank(s)"
            failed += soak(row, SCRIPT_RUNS, lambda _run_dir, _number, command=command: command, None)
    for path in sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.ipynb"), *ROOT.glob("0*/*.ipynb"))):
        failed += soak(path, NOTEBOOK_RUNS, lambda _run_dir, _number, path=path: notebook(path), ROOT)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
