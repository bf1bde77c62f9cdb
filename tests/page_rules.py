"""What the pages say is true of the code: rules for commands, options, files and names.

Each is a function from a page and its text to what is wrong. tests/pages/test_docs.py applies them.
"""

import functools
import json
import re
import subprocess
from pathlib import Path

import torch
from command_rules import (
    MAKEFILE,
    arguments_exist,
    code,
    commands_can_be_parsed,
    make_targets_exist,
    modules_exist,
    options_are_the_programs_own,
    options_exist,
    spans,
)

from common import ROOT

# --- files, names, numbers ------------------------------------------------------------------------------------

SUFFIXES = (
    ".py", ".md", ".ipynb", ".yaml", ".yml", ".txt", ".toml", ".json", ".jsonl", ".sbatch", ".sh", ".pt",
    ".csv", ".png",
)  # fmt: skip
# What a run leaves, what a reader makes, and what belongs to the machine.
NOT_HERE = {
    "config.json", "metrics.jsonl", "loss.png", "checkpoint-000250/", "checkpoint-000150/",
    ".checkpoint-000150.partial/", "manifest.json", "grades.csv", "train.py", "tensorboard/", "jane.py", "ali.py",
    "jane/exercises.py", "FOLDER/jane.py", "FILE.yaml", "FILE.py", "course/name", "doctor-report.txt", "shared/run",
    "tokens/s",
}  # fmt: skip


@functools.cache
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    return [Path(name) for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def paths_exist(page, text):
    """Names of files and folders in code: from the root, from the page's folder, or in a chapter."""
    suffixes = "|".join(suffix[1:] for suffix in SUFFIXES)
    for line in code(text):
        for word in line.split():
            path = word.rstrip(",:.")
            looks = re.fullmatch(rf"[\w.*/-]+\.({suffixes})|[\w.*-]*[A-Za-z*][\w.*-]*(/[\w.*-]*)+", path)
            if looks and path not in NOT_HERE and not path.startswith("runs/") and not is_there(page, path):
                yield f"there is no {path}"


def is_there(page: Path, path: str) -> bool:
    below = f"/{path.rstrip('/')}/"
    if path.split("/")[0] == ".venv":  # the reader's, wherever the tests' is
        return True
    return any(file.match(path) or below in f"/{file}" for file in tracked()) or any(
        next(folder.glob(path), None) for folder in (ROOT, page.parent)
    )


# Of other programs and libraries, or invented for an example; and what variables of others begin with.
FOREIGN = set(re.findall(r"[\w.]+", """
    runners CHECK_RESULTS NN_name RendezvousTimeoutError split_dataset_by_node torchfrtrace dmesg sacct docker tee
    eth logdir join_timeout dependency singleton JobID MaxRSS PYTORCH_ALLOC_CONF expandable_segments TRACE PID
    SeqNum EnforceNotMet throwing stage3_prefetch_bucket_size reduce_bucket_size stage3_max_live_parameters
    use_multi_rank_bucket_allreduce gather_for_metrics stage3_param_persistence_threshold zero_hpz_partition_size
    stage3_gather_16bit_weights_on_model_save terminationGracePeriodSeconds TUNING ofi graph_breaks SLURM_PROCID
    Cause recvValueWithTimeout Watchdog trace_ ali
"""))  # fmt: skip
VARIABLES = ("NCCL_", "TORCH_", "CUDA_")


@functools.cache
def words_of_the_code() -> set[str]:
    files = [path for path in tracked() if path.suffix in (".py", ".toml") and path.name != "page_rules.py"]
    names = "\n".join(str(path) for path in tracked())
    return set(re.findall(r"\w+", "\n".join((ROOT / path).read_text() for path in files) + MAKEFILE + names))


@functools.cache
def words_of_torch() -> set[str]:
    """Of the parts that notebooks speak about."""
    folders = [Path(torch.__file__).parent / name for name in ("distributed", "nn", "cuda", "optim", "utils/data")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return set(re.findall(r"\w+", "\n".join(file.read_text(errors="ignore") for file in files)))


def words_of_cells(notebook: Path) -> set[str]:
    cells = json.loads(notebook.read_text())["cells"] if notebook.exists() else []
    return set(re.findall(r"\w+", "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")))


def names_exist(page, text):
    """Each word in backticks, such as those of `make_mesh` and `Strategy.parts()`, occurs in the code.

    A notebook may also name what its cells define, and what PyTorch has.
    """
    known = words_of_the_code() | FOREIGN
    if page.suffix == ".ipynb":
        known = known | words_of_cells(page) | words_of_torch()
    for span in spans(text):
        for word in re.findall(r"(?<!\w)[A-Za-z_]\w{2,}", span):
            if word not in known and not word.startswith(VARIABLES):
                yield f"no {word} in the code (`{span}`)"


def sections_exist(page, text):
    """A notebook numbers its sections without a gap, and names none that it does not have. (Not those of a paper.)"""
    if page.suffix != ".ipynb":
        return
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"its sections have the numbers {numbers}"
    for found in re.finditer(r"\bsections? (\d+)(?:(?:,| and| or| to) (\d+))?(?!\.?\d)", text):
        if not re.search(r"\b(19|20)\d\d\b", text[max(0, found.start() - 60) : found.start()]):
            missing = [number for number in found.groups() if number and int(number) not in numbers]
            yield from (f"there is no section {number}" for number in missing)


def has_each_heading_once(page, text):
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    yield from sorted({f"has {name!r} twice" for name in headings if headings.count(name) > 1})


IN_NOTEBOOKS = [
    make_targets_exist,
    modules_exist,
    options_are_the_programs_own,
    options_exist,
    commands_can_be_parsed,
    arguments_exist,
    paths_exist,
    names_exist,
    sections_exist,
]
RULES = [
    *IN_NOTEBOOKS,
    has_each_heading_once,
]
