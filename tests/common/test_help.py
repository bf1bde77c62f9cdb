"""What --help shows, word for word; and that it fits into the terminal."""

import re
from dataclasses import dataclass, fields

import pytest
from helpers import configure

from common import generate, runs
from common.command_line import Parser, add
from common.options import option

# With --strategy zero2. Joined are the lines that argparse breaks, and the spaces of its columns.
PAGE = """\
Train a small model on one process or on many. README.md has examples.
how training is spread over the ranks:
  strategies: single, dp, ddp, model, tensor, sequence, context, ulysses, expert, pipeline, pipeline+ddp, \
pipeline+fsdp, zero1, zero2, fsdp, hsdp, tensor+fsdp, mesh
  --strategy WORD one of these, or auto: the fastest by the planner (default: what --mesh names, else the \
chapter's own)
  --implementation WORD pytorch, by-hand, or another that the strategy has (default: pytorch)
  --by-hand short for --implementation by-hand: built from collectives
  --mesh WORD ranks along each axis, as in data=2,tensor=2; axes: pipeline, data, shard, context, expert, tensor
  --mesh-order WORD axes from outermost to innermost (default: as above)
  --distributed join the processes that torchrun started
  --backend {auto,gloo,nccl} auto: NCCL where each process has a GPU, else gloo (default: auto)
  --device {auto,cpu,cuda} auto: CUDA where there is one (default: auto)
  --check-collectives compare each collective across the ranks before it starts
  --timeout FLOAT seconds that a rank waits for the others in a collective (default: 300.0)
the run:
  --steps INT optimizer steps (default: 250)
  --dry-run say what each rank would read, hold and send, for the ranks of --mesh, and exit
  --run-dir WORD where the run is kept (default: a new folder under runs/)
  --checkpoint-every INT steps between checkpoints; 0: only one at the end (default: 50)
  --keep INT newest checkpoints that are kept (default: 2)
  --async-checkpoint write checkpoints while training goes on, from a copy in host memory
  --resume [STEP|FOLDER] go on from a checkpoint of --run-dir (default: the newest, of the newest run), or from any
  --validate-every INT steps between losses on text that is not trained on, and one at the end; 0: none (default: 0)
  --log-every INT steps between the lines that rank 0 prints (default: 10)
  --tensorboard also write the metrics for TensorBoard, into the run directory
  --sample INT bytes that the model writes before and after training (default: 0)
the model:
  --layers INT the GPT's blocks (default: 4)
  --width INT the GPT's activations per token (default: 128)
  --heads INT the GPT's attention heads; they divide the width (default: 4)
  --precision {fp32,bf16,fp16} of the forward pass (default: fp32)
  --seed INT of the initial weights and of the order of the data (default: 0)
the optimizer:
  --optimizer {sgd,adamw} which one (default: adamw)
  --lr FLOAT learning rate, reached after a linear warm-up (default: 0.002)
  --warmup-steps INT steps of the warm-up (default: 20)
  --lr-schedule {constant,cosine} after the warm-up; cosine: down to a tenth at --steps (default: constant)
  --weight-decay FLOAT of adamw: a step takes this x lr of a weight away (default: 0.1)
  --beta1 FLOAT of adamw: how slowly the mean of gradients changes (default: 0.9)
  --beta2 FLOAT of adamw: the same, of squared gradients (default: 0.95)
  --max-norm FLOAT the gradient's 2-norm is clipped to this; inf: not at all (default: 1.0)
the data:
  --task {text,images} text: a GPT on bytes; images: a small ResNet (default: text)
  --context INT tokens per example of text (default: 128)
  --text WORD file or folder to learn the bytes of (default: Python's standard library)
  --dataset {digits,fashion-mnist,cifar10} pictures for --task images (default: digits)
  --data-dir WORD where fashion-mnist or cifar10 lie (default: data)
  --download download the dataset to --data-dir if it is not there
  --batch-size INT examples in the GLOBAL batch of a step (default: 32)
  --accumulation-steps INT backward passes per step on each rank (default: 1)
strategy zero2:
  --recompute {none,selective,full} what the GPT's blocks compute again for the backward pass (default: none)
  --offload keep shards and optimizer in host memory
  --find-batch-size tell the largest --batch-size within --memory-budget, and train nothing
  --memory-budget FLOAT GiB that each rank may use, with --find-batch-size (default: 0.0)
this program:
  -h, --help show this; with --strategy NAME, that strategy's options
  --config FILE.yaml read options from a file; the command line wins
options of other strategies (--strategy NAME --help says what they do):
  --loading dispatch, shard, stream, shard-stream, shard-stream-workers; of ddp
  --experts of expert
  --top-k of expert
  --schedule gpipe, 1f1b, interleaved, looped-bfs, zb-h1, interleaved-zb, zbv, dualpipev; of pipeline, \
pipeline+ddp, pipeline+fsdp, mesh
  --microbatches of pipeline, pipeline+ddp, pipeline+fsdp, mesh
  --stages-per-rank of pipeline, pipeline+ddp, pipeline+fsdp, mesh
  --split-spec of pipeline, pipeline+ddp, pipeline+fsdp, mesh
"""


def shown(line: str, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        configure(line)
    assert end.value.code == 0
    return capsys.readouterr().out


def joined(text: str) -> list[str]:
    """Lines of help, each with what belongs to it."""
    found = []
    for line in text.splitlines():
        if re.match(r" {20,}\S", line) or (found and found[-1].startswith("  strategies: ") and line.startswith("  p")):
            found[-1] += " " + line.strip()
        elif line.strip():
            found.append(re.sub(r"(?<=\S) {2,}", " ", line))
    return found


def test_the_page_word_for_word(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    usage, *lines = joined(shown("--strategy zero2 --help", capsys))
    assert usage.endswith(" [OPTION ...]"), "the first line of --help"
    for line, expected in zip(lines, PAGE.splitlines(), strict=False):
        assert line == expected, "a line of --help"
    assert len(lines) == len(PAGE.splitlines()), "lines of --help"
    assert joined(shown("--strategy zero2 -h", capsys))[1:] == lines, "the short form says the same"


@pytest.mark.parametrize("columns, most", [("60", 60), ("200", 102)])
def test_lists_are_as_wide_as_the_terminal_and_not_much_wider_than_a_page(columns, most, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = shown("--strategy zero2 --help", capsys)
    others = text[text.index("options of other strategies") :].partition("\n")[2]
    lists = [text.partition("  strategies: ")[2].partition("\n\n")[0], others]
    longest = max(len(line) for part in lists for line in part.splitlines())
    assert most - 20 < longest <= most, f"characters of the longest line in {columns} columns"


HELP, JSON = "-h, --help show this help message and exit", "--json print JSON"
ONE = f"RUN positional arguments: RUN options: {HELP} {JSON}"
MANY = f"RUN [RUN ...] positional arguments: RUN options: {HELP} {JSON}"
OF_RUNS = {
    "": "[-h] {list,summary,ranks,plot,compare,export} ... Look at runs, compare them, and take their models "
    "elsewhere. positional arguments: {list,summary,ranks,plot,compare,export} "
    "list what there is under runs/ "
    "summary losses, speed, checkpoints; of several runs, speed-up over the first "
    "ranks of each rank: host, memory, use of its processor, time waited "
    "plot a metric over steps, tokens or seconds "
    "compare the first step at which each run differs from the first "
    f"export the model of a checkpoint in one file options: {HELP}",
    "list": f"[-h] [--json] options: {HELP} {JSON}",
    "summary": f"[-h] [--json] {MANY}",
    "ranks": f"[-h] [--json] {ONE}",
    "plot": "[-h] [--json] [--metric METRIC] [--over {steps,tokens,seconds}] [--out OUT] "
    f"{MANY} --metric METRIC a key of metrics.jsonl (default: loss) --over {{steps,tokens,seconds}} "
    "--out OUT the picture (default: runs.png)",
    "compare": f"[-h] [--json] [--tolerance TOLERANCE] {MANY} --tolerance TOLERANCE relative (default: 1e-5)",
    "export": f"[-h] [--json] [--safetensors] [--step STEP] [--out OUT] {ONE} "
    "--safetensors in this format, and not as torch.save does --step STEP of which checkpoint (default: the newest "
    "that is whole) --out OUT the file (default: in the run's folder)",
}
OF_GENERATE = (
    "[-h] [--prompt PROMPT] [--length LENGTH] [--temperature TEMPERATURE] [--seed SEED] [--step STEP] RUN Let the "
    f"model of a run write. positional arguments: RUN options: {HELP} --prompt PROMPT what it goes on from (default: "
    "'def ') --length LENGTH bytes that it writes (default: 200) --temperature TEMPERATURE 0: always the likeliest "
    "byte (default: 0.8) --seed SEED of the draws (default: 0) --step STEP of which checkpoint (default: the newest "
    "that is whole)"
)


def test_the_help_of_the_programs_that_look_at_runs(capsys, monkeypatch):
    """And what is meant where an option is left out, which the help says."""
    monkeypatch.setenv("COLUMNS", "300")
    pages = {f"common.runs {name}".strip(): (runs, page) for name, page in OF_RUNS.items()}
    for program, (module, page) in (pages | {"common.generate": (generate, OF_GENERATE)}).items():
        with pytest.raises(SystemExit):
            module.parser().parse_args([*program.split()[1:], "--help"])
        assert " ".join(capsys.readouterr().out.split()) == f"usage: python -m {program} {page}", program
    meant = vars(runs.parser().parse_args(["plot", "a"])) | vars(runs.parser().parse_args(["compare", "a", "b"]))
    assert (meant["metric"], meant["over"], meant["out"].name) == ("loss", "steps", "runs.png"), "of a plot"
    assert meant["tolerance"] == 1e-5, "of a comparison"
    assert vars(generate.parser().parse_args(["a"])) == {
        "run": "a", "prompt": "def ", "length": 200, "temperature": 0.8, "seed": 0, "step": None
    }, "of common.generate"  # fmt: skip


@dataclass
class Made:
    share: float = option(0.0, "at most 50% of it")
    kind: str = option("aa", "which", ("aa", "b" * 20, "c" * 20))
    bare: str = option("", "may stand alone", bare="this")


def test_percent_signs_long_choices_and_options_that_stand_alone():
    parser = Parser(usage="", add_help=False)
    add(parser, "made up", fields(Made))
    assert " ".join(parser.format_help().split("made up:")[1].split()) == (
        f"--share FLOAT at most 50% of it (default: 0.0) --kind WORD aa, {'b' * 20}, {'c' * 20}: which (default: aa) "
        "--bare [STEP|FOLDER] may stand alone"
    )
    assert parser.parse_args(["--bare"]).bare == "this" and parser.parse_args(["--bare", "that"]).bare == "that"
