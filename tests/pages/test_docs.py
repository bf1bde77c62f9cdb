"""What the pages say is true of the code. The rules stand in page_rules.py; each is shown to bite."""

import json
import re
from collections.abc import Callable

import pytest
import yaml
from command_rules import commands
from helpers import LAUNCHER
from page_rules import (
    IN_NOTEBOOKS,
    NOTEBOOKS,
    RULES,
    arguments_exist,
    axes_of,
    commands_can_be_parsed,
    counts_are_right,
    has_each_heading_once,
    hours_are_right,
    lists_what_there_is,
    make_targets_exist,
    modules_exist,
    names_exist,
    options_are_the_programs_own,
    options_exist,
    paths_exist,
    sections_exist,
    strategies_are_those_of_the_table,
)

from common import ROOT, cluster_check
from common.config import Config
from course.strategies import STRATEGIES

README, PAGE, TABLE = ROOT / "README.md", ROOT / "docs" / "page.md", ROOT / "docs" / "strategies.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    """Parsing a command claims its run directory."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_page(page, rule):
    wrong = list(rule(page, page.read_text()))
    assert not wrong, "\n".join([str(page), *wrong])


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_what_a_notebook_says(path):
    cells = json.loads((ROOT / path).read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = text.partition("\n## References")[0]  # files and names of others
    wrong = [problem for rule in IN_NOTEBOOKS for problem in rule(ROOT / path, text)]
    assert not wrong, "\n".join([path, *wrong])


# --- planted mistakes -----------------------------------------------------------------------------------------

MISTAKES = {
    "target": (make_targets_exist, PAGE, "Run `make diagnose`."),
    "target in a block": (make_targets_exist, PAGE, "```\nmake test\nmake diagnose VENV=.venv\n```"),
    "module": (modules_exist, PAGE, "```\npython -m common.health\n```"),
    "module in a sentence": (modules_exist, PAGE, "First, `python -m\ncommon.health` says so."),
    "option of the scripts": (
        options_are_the_programs_own,
        PAGE,
        "```\ntorchrun --nproc_per_node=2 distributed_training.py --distributed --resume \\\n    --global-batch 8\n```",
    ),
    "option of the checker": (options_are_the_programs_own, PAGE, "`python -m common.check 01_intro --table`"),
    "option of torchrun": (options_are_the_programs_own, PAGE, "`torchrun --ranks=2 distributed_training.py --resume`"),
    "option in a table": (options_exist, PAGE, "| `--global-batch N` | examples |"),
    "option in a notebook": (options_exist, ROOT / "03_ddp" / "x.ipynb", "Choose with `--load`."),
    "a schedule for ddp": (
        commands_can_be_parsed,
        PAGE,
        "`torchrun --nproc_per_node=2 distributed_training.py --distributed --schedule gpipe`",
    ),
    "forgotten": (commands_can_be_parsed, PAGE, "`torchrun --nproc_per_node=2 distributed_training.py`"),
    "ranks of a mesh": (
        commands_can_be_parsed,
        PAGE,
        "`torchrun --nproc_per_node=2 distributed_training.py --distributed --mesh data=2,tensor=2`",
    ),
    "another chapter's": (
        commands_can_be_parsed,
        ROOT / "06_fsdp" / "x.ipynb",
        "`python distributed_training.py --loading dispatch`",
    ),
    "chapter": (arguments_exist, PAGE, "`python -m common.check 04_parallel`"),
    "exercise": (arguments_exist, PAGE, "```\npython -m common.check 01_intro ring_shifts  # one\n```"),
    "exercise of another chapter": (arguments_exist, PAGE, "`python -m common.check 03_ddp ring_shift`"),
    "bug": (arguments_exist, ROOT / "03_ddp" / "x.ipynb", "`python classroom/bugs.py stale_chunk --answer`"),
    "variable of make": (arguments_exist, PAGE, "`make check CHAPTERS=03_ddp`"),
    "chapter for make": (arguments_exist, PAGE, "`make check CHAPTER=03_dpd`"),
    "section": (sections_exist, ROOT / "03_ddp" / "x.ipynb", "## 1. One\n\nSee section 2."),
    "section left out": (sections_exist, ROOT / "03_ddp" / "x.ipynb", "## 1. One\n\n## 3. Three"),
    "name in a notebook": (names_exist, ROOT / "03_ddp" / "x.ipynb", "It is `DDPByHands`, a `SyncBatchNorm`."),
    "file": (paths_exist, ROOT / "CONTRIBUTING.md", "Add it to `tests/test_training.py`."),
    "file in a block": (paths_exist, ROOT / "CONTRIBUTING.md", "```\npytest tests/test_training.py  # one file\n```"),
    "file of no chapter": (paths_exist, PAGE, "See `proof.py`."),
    "folder": (paths_exist, PAGE, "It stands in `common/train/`."),
    "name": (names_exist, PAGE, "Raise `StrategyError`."),
    "name in small letters": (names_exist, PAGE, "Its second argument is the `mezh`."),
    "name in a sentence of code": (names_exist, PAGE, "Write `from course.ddp.by_hand import Redusser`."),
    "folder of no chapter": (paths_exist, PAGE, "They stand in `clasroom/` and in `comon/lab/`."),
    "name of a module": (names_exist, PAGE, "It calls `equality.prove_class(...)`."),
    "count": (counts_are_right, PAGE, "| [02_data_parallel](02_data_parallel) | threads | sixteen exercises |"),
    "count of bugs": (counts_are_right, PAGE, "* 02_data_parallel has forty-two\nplanted bugs"),
    "count of strategies": (counts_are_right, PAGE, "There are seventeen strategies."),
}  # fmt: skip


@pytest.mark.parametrize("file", sorted((ROOT / "launch").iterdir()), ids=lambda path: path.name)
def test_what_is_submitted_to_a_cluster(file):
    """Its torchrun lines have options that torchrun and the scripts have."""
    text = f"```\n{file.read_text().replace('exec torchrun', 'torchrun')}\n```"
    started = [words for words in commands(text) if {"torchrun", "distributed_training.py"} <= {*words}]
    assert len(started) == 1, f"{file.name} starts {len(started)} trainings"
    wrong = list(options_are_the_programs_own(file, text))
    assert not wrong, wrong
    planted = list(options_are_the_programs_own(file, text.replace("--run-dir", "--run-folder")))
    assert len(planted) == 1 and planted[0].endswith("no option --run-folder")


def test_the_kubernetes_job_asks_for_as_many_gpus_as_processes():
    trainer = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"] == 4


def table(change: Callable[[str], str] = str) -> str:
    """A page with a table of strategies that is right but for a change."""
    lines = ["| `--strategy` | what is divided over the processes | axes | PyTorch's | `--by-hand` |", "|---|---|---|"]
    for name, entry in STRATEGIES.items():
        kinds = entry.implementations
        cells = [f"`{name}`", "", " ".join(f"`{axis}`" for axis in axes_of(name))]
        cells += ["yes" if kind in kinds else "" for kind in ("pytorch", "by-hand")]
        lines.append("| " + " | ".join(cells) + " |")
    return change("\n".join([*lines, "", "| `another` | table |", "|---|---|", "| `x` | y |"]))


TABLES = {
    "no hsdp": lambda text: re.sub(r"\| `hsdp`.*\n", "", text),
    "ulysses of PyTorch": lambda text: re.sub(r"(\| `ulysses` .*) \|  \| yes", r"\1 | yes | yes", text),
    "hsdp by hand": lambda text: re.sub(r"(\| `hsdp` .*) \| yes \| yes", r"\1 | yes | ", text),
    "axes of tensor": lambda text: text.replace("| `tensor` |  | `tensor` ", "| `tensor` |  | `data` "),
    "one too many": lambda text: text.replace("| `dp` |", "| `dp`, `dpp` |"),
}
MISTAKES |= {name: (strategies_are_those_of_the_table, TABLE, table(change)) for name, change in TABLES.items()}
MISTAKES |= {
    "no table": (strategies_are_those_of_the_table, TABLE, table(lambda text: text.replace("axes", "axis"))),
    "no link": (lists_what_there_is, README, README.read_text().replace("](06_fsdp/01_zero.ipynb)", "]")),
    "hours": (hours_are_right, README, re.sub(r"[\d.]+ h \|\n", "77 h |\n", README.read_text(), count=1)),
    "hours of a path": (hours_are_right, README, README.read_text().replace("seventeen hours", "thirteen hours")),
    "twice": (has_each_heading_once, PAGE, "### Mesh\n\nA grid.\n\n### Mesh\n\nA net."),
}


@pytest.mark.parametrize("file", ["Makefile", "README.md"])
def test_jupyterlab_is_started_in_the_root_with_the_first_page(file):
    """A notebook that is given as an argument makes its folder the server's root: no other chapter is seen there."""
    (options,) = re.findall(r"^(?:\t|\| `make lab` \| `)jupyter lab ([^`\n]*)", (ROOT / file).read_text(), re.MULTILINE)
    opened = re.fullmatch(r"--LabApp\.default_url=/lab/tree/(\S+)", options)
    assert opened and opened[1] == NOTEBOOKS[0], options


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rule_bites(mistake):
    rule, page, text = MISTAKES[mistake]
    found = {other.__name__: problems for other in RULES if (problems := list(other(page, text)))}
    # A command, an option or a file that is not there may be a word that the code does not have, too.
    assert found.keys() - {"names_exist"} == {rule.__name__} - {"names_exist"} and rule.__name__ in found, found


def test_a_module_that_no_page_describes_is_seen():
    page = ROOT / "docs" / "architecture.md"
    text = page.read_text()
    for name in ("`common/lab/launch.py`", "`tests/strategies/test_mesh.py`", "`by_hand_mesh.py`"):
        found = {*lists_what_there_is(page, text.replace(name, "it"))} - {*lists_what_there_is(page, text)}
        assert found == {f"does not mention {name}"}


def test_every_rule_is_shown_to_bite():
    assert {rule for rule, _, _ in MISTAKES.values()} == set(RULES)


GOOD = """
`make test PYTHON=python3.12`, `python -m common.doctor`, `python -m common.check 01_intro --csv`, `--csv`, `--answer`

```
torchrun --nproc_per_node=2 --standalone distributed_training.py --distributed \\
    --mesh data=2 --run-dir "$run"  # comment
srun --kill-on-bad-exit=1 torchrun --nproc_per_node=gpu distributed_training.py --distributed
```

`--kill-on-bad-exit` ends them. `tests/helpers.py`, `helpers.py`, `0*/*.ipynb`, `EADDRINUSE`,
`python -m common.check 01_intro ring_shift`, `python 03_ddp/classroom/bugs.py NAME`, `make check CHAPTER=03_ddp`,
`Strategy.parts()`, `make_mesh`, `classroom/`, `axis(mesh, "data")`, `classroom/bugs.py`, `course/`, `config.json`.
There are six chapters and eighteen strategies, two of three bugs.
"""


def test_a_good_page_passes():
    assert {rule.__name__: list(rule(PAGE, GOOD)) for rule in RULES if list(rule(PAGE, GOOD))} == {}
    assert list(strategies_are_those_of_the_table(TABLE, table())) == []
    assert list(lists_what_there_is(README, README.read_text())) == []


def test_numbers_of_the_code_that_pages_repeat():
    said = {
        "docs/cluster.md": (
            f"The scripts give a collective {Config.timeout:g} seconds (`--timeout`)",
            f"a rank whose matrix products take more than {cluster_check.STRAGGLER} times as long as those of",
            f"a link that takes more than {({2.0: 'twice'})[cluster_check.SLOW]} as long as",
        ),
    }
    for page, sentences in said.items():
        text = " ".join((ROOT / page).read_text().split())
        for sentence in sentences:
            assert sentence in text, f"{page} does not say: {sentence}"


def test_the_slurm_job_is_what_its_page_explains():
    """Options of sbatch and srun that the page explains one by one stand in the file as the page writes them."""
    job = (ROOT / "launch/slurm.sbatch").read_text()
    section = (ROOT / "docs/cluster.md").read_text().partition("## SLURM")[2].partition("\n## ")[0]
    explained = re.findall(r"^\* `(--[^`]+)`", section, re.MULTILINE)
    assert len(explained) >= 2
    for option in explained:
        assert f" {option}" in job or f"#SBATCH {option}\n" in job, f"the page explains {option}"
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job, re.MULTILINE))
    assert asked["signal"].startswith("TERM@"), "to the job's steps, whose ranks save; with B: to the shell alone"


def test_the_kubernetes_job_writes_to_its_volume():
    spec = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())["spec"]
    (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    command = spec["trainer"]["command"][-1]
    for path in re.search(r"--run-dir (\S+)", command)[1], re.search(r'compgen -G "(\S+)"', command)[1]:
        assert path.startswith(f"{mount['mountPath']}/"), f"{path} is not on the volume at {mount['mountPath']}"
    assert mount["name"] == pod["volumes"][0]["name"]
