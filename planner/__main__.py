"""The planner's commands.

python -m planner plan --model llama-7b --gpus 8 --gpu h100-80gb --batch-size 512 --sequence 4096
python -m planner estimate --model llama-3-8b --gpu h100-80gb --gpus 8 --mesh shard=8 --zero-stage 3 --batch-size 16
python -m planner emit --format accelerate --model llama-3-8b --gpu h100-80gb --gpus 8 --batch-size 16
"""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import ROOT
from common.axes import parse_axes, resolve
from common.constants import GIB
from common.did_you_mean import did_you_mean
from common.errors import UserError, finite, one_line_errors, writing
from planner import as_course, constants, hardware, models
from planner.adapters import ON
from planner.emit import COURSE, FORMATS, FRAMEWORK_OF, JOB, Emitted, emit, predicted
from planner.estimate import Estimate, estimate
from planner.frameworks import FRAMEWORKS
from planner.hardware import cluster
from planner.layout import ATTENTION, FRAMEWORK, PRECISION_ALIASES, PRECISIONS, RECOMPUTE, make_layout, usual_precision
from planner.names import lookup
from planner.output import explain, one_layout, table

SCHEDULE_ALIASES = {"interleaved-1f1b": "interleaved", "interleaved1f1b": "interleaved", "afab": "gpipe",
                    "zb-v": "zbv", "zero-bubble": "zb-h1", "dualpipe": "dualpipev"}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Its errors are one line, with the nearest option."""

    def error(self, message):
        if message.startswith("unrecognized arguments: "):
            wrong = message.split(": ", 1)[1].split()[0]
            message = f"unknown option '{wrong}'; {did_you_mean(wrong, self._option_string_actions, 'see --help')}"
        elif "invalid choice" in message and "argument command" in message:
            wrong = message.split("invalid choice: ")[1].split("'")[1]
            hint = did_you_mean(wrong, COMMANDS, otherwise=f"there are {', '.join(COMMANDS)}")
            message = f"unknown command '{wrong}'; {hint}"
        elif message.endswith("required: command"):
            message = f"give a command: {', '.join(COMMANDS)}"
        raise UserError(message)


def yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"expected yes or no, not '{text}'")
    return text == "yes"


def parser() -> tuple[Parser, dict[str, Parser]]:
    main = Parser(prog="python -m planner", description=__doc__, allow_abbrev=False,
                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = main.add_subparsers(dest="command", required=True, metavar="command")
    subs = {name: commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
            for name, help_ in COMMANDS.items()}  # fmt: skip
    for name in ("plan", "estimate", "emit", "probe"):
        add = subs[name].add_argument
        add("--model", help="a name (python -m planner models), or a config.json; what follows changes its shape")
        for what in ("layers", "width", "heads", "kv-heads", "mlp-width", "vocabulary", "experts", "top-k",
                     "expert-width", "shared-experts", "head-width"):  # fmt: skip
            add(f"--{what}", type=int)
        add("--mlp", help="gelu (two matrices; biases, learned positions and a tied head, as GPT-2) or swiglu (three)")
        more = "; without it, all are compared" if name == "plan" else ""
        add("--gpu", required=name != "plan", help=f"python -m planner hardware lists them{more}")
        add("--gpus", type=int, required=True)
        add("--gpus-per-node", type=int, help="in one NVLink domain; by default as usual with this GPU")
        add("--network", help="between nodes; by default as usual with this GPU")
        add("--adapters", type=int, help="network adapters of a node")
        add("--batch-size", type=int, required=True, help="sequences of a step, of all GPUs together")
        add("--sequence", type=int, default=2048, help="tokens of a sequence")
        add(
            "--precision",
            help=f"{', '.join(PRECISIONS)}; by default mixed, in the GPU's own 16 bits",
        )
        add("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank in place of the model")
        add("--lora-on", default="all", help=f"which linear layers have one: {', '.join(ON)}; by default all")
        add("--nf4", action="store_true", help="with --lora: the frozen linear layers are in 4 bits (QLoRA)")
        usual = None if name == "emit" else FRAMEWORK  # there it is the format's
        add("--framework", default=usual, help=f"whose memory and launches: {', '.join(FRAMEWORKS)}")
        add("--max-memory-gb", type=finite, help="GiB of a GPU that may be used, if not all")
        add("--constants", help="a file that calibrate wrote")
        if name == "probe":
            continue
        add("--json", action="store_true")
        if name != "emit":
            add("--explain", action="store_true", help="every number as a formula with its values and source")
            continue
        add("--format", required=True, help=", ".join(FORMATS))
        add("--out", metavar="FOLDER", help="write the files there, in place of printing them")
    add = subs["plan"].add_argument
    add("--count", type=int, default=5, help="layouts to print")
    add("--price", metavar="GPU=DOLLARS", nargs="*", default=[], help="per GPU and hour, for a comparison of GPUs")
    add("--by", choices=["time", "money", "energy"], default="time", help="the order of GPUs that are compared")
    add("--plot", metavar="FILE.png", help="a picture of the best layouts: memory and time by parts")
    for name in ("estimate", "emit", "probe"):
        add_layout(subs[name].add_argument)
    add = subs["probe"].add_argument
    add("--seconds", type=finite, required=True, help="of a step of this layout, as you have measured it")
    add("--out", default="probe.json", metavar="FILE.json", help="for --constants; what stands there is added to")
    add = subs["scoreboard"].add_argument
    add("--runs", action="store_true", help="every run as well")
    add("--every", action="store_true", help="all published runs, not only 60 of a source: takes a minute")
    add("--refit", action="store_true", help="fit the constants again, and store them: takes a minute or two")
    add("--json", action="store_true")
    add = subs["calibrate"].add_argument
    add("--out", default="constants.json", metavar="FILE.json", help="for --constants")
    add("--ranks", type=int, default=2, help="of the collectives that are timed")
    add = subs["benchmark"].add_argument
    add("--models", default="tiny", help="comma-separated: tiny, small, wide, deep")
    add("--max-gpus", type=int, default=2, help="processes at most; 1, 2, 4, ... are tried")
    add("--batch-size", default="16", help="comma-separated: sequences of a step, of all processes together")
    add("--precision", default="fp32", help=f"comma-separated: {', '.join(as_course.PRECISION.values())}")
    add("--steps", type=int, default=10, help="that are timed")
    add("--constants", help="a file that calibrate wrote")
    add("--output", metavar="FILE.json", help="write the grid, or with --run what was measured, there as well")
    add("--run", action="store_true", help="train each, and compare; without this the grid is printed")
    add("--json", action="store_true")
    add = subs["explain"].add_argument
    add("file", metavar="FILE", help="config.json, torchtitan's TOML, Megatron-LM's arguments, nanotron's YAML, "
        "DeepSpeed's JSON, Accelerate's YAML, TrainingArguments as JSON, or this course's YAML")  # fmt: skip
    add("--model", help="where the file has none (python -m planner models), or in its place")
    add("--gpu", required=True, help="python -m planner hardware lists them")
    add("--gpus", type=int, help="where the file does not say")
    add("--gpus-per-node", type=int)
    add("--network")
    add("--adapters", type=int)
    add("--batch-size", type=int, help="sequences of a step; what is said here wins over the file")
    add("--micro-batch", type=int)
    add("--sequence", type=int)
    add("--precision", help=", ".join(PRECISIONS))
    add("--recompute", help=", ".join(RECOMPUTE))
    add("--zero-stage", type=int)
    add("--framework", help=f"whose memory and launches: {', '.join(FRAMEWORKS)}")
    add("--constants", help="a file that calibrate wrote")
    add("--format", help=f"write it for another tool: {', '.join(FORMATS)}")
    add("--json", action="store_true")
    add = subs["goodput"].add_argument
    add("--gpus", type=int, required=True)
    add("--failures", type=finite, required=True, help="of a GPU per hour, with its share of the node, as 1.5e-5")
    add("--checkpoint-seconds", type=finite, required=True, help="that training stands still for a checkpoint")
    add("--restart-minutes", type=finite, default=10, help="from a failure to the next step")
    add("--interval-minutes", type=finite, help="between checkpoints; by default the best, by Daly")
    add("--repair-hours", type=finite, default=24, help="that a failed node is away")
    add("--spares", type=int, help="nodes; by default as many as are needed")
    add("--tokens", type=finite, help="to train on, as 1e12; with --tokens-per-second of all GPUs, as `plan` says")
    add("--tokens-per-second", type=finite)
    add("--json", action="store_true")
    add = subs["measure"].add_argument
    add("what", metavar="FILE.py:FUNCTION", help="the function returns (module, inputs of one GPU's micro-batch)")
    add("--gpu", required=True, help="python -m planner hardware lists them")
    add("--gpus", type=int, required=True)
    add("--precision", help=f"{', '.join(PRECISIONS)}; by default mixed, in the GPU's own 16 bits")
    add("--constants", help="a file that calibrate wrote")
    add("--json", action="store_true")
    for name in ("models", "hardware"):
        subs[name].add_argument("--json", action="store_true")
    return main, subs


def add_layout(add: Callable) -> None:
    """The options of a layout that is named."""
    add("--mesh", default="", help="such as data=2,shard=4,pipeline=2,context=1,tensor=4")
    add("--zero-stage", type=int, help="0 to 3; by default 3 where the mesh has an axis 'shard'")
    add("--micro-batch", type=int, default=1, help="sequences that a rank computes at once")
    add("--schedule", default="1f1b")
    add("--stages-per-rank", type=int, default=1)
    add("--ends", action="store_true", help="of a pipeline: embedding and head count as a layer each")
    add("--recompute", default="none", help=", ".join(RECOMPUTE))
    add("--recompute-layers", type=int, metavar="N", help="with --recompute full: so many layers of each stage alone")
    add("--offload", action="store_true", help="gradients and optimizer state in the host's memory")
    add("--sequence-parallel", type=yes, default=True, metavar="yes|no", help="with tensor parallelism; by default yes")
    add("--flash", type=yes, default=True, metavar="yes|no", help="attention that keeps no scores; by default yes")
    add("--attention", default="", help=f"its kernel: {', '.join(ATTENTION)}; by default the framework's")
    add(
        "--balanced", type=yes, default=True, metavar="yes|no", help="shares of attention along context; by default yes"
    )
    add("--fused", type=yes, default=True, metavar="yes|no", help="torch.compile or fused kernels; by default yes")
    add("--fused-loss", type=yes, default=False, metavar="yes|no", help="the loss compiled too; by default no")
    add("--dropout", type=yes, default=False, metavar="yes|no", help="after attention and MLP; by default no")
    add("--whole-experts", action="store_true", help="of a mixture, ranks along tensor have different ones, uncut")
    add("--async-tensor", type=yes, default=False, metavar="yes|no", help="messages beside products; by default no")
    add("--overlap-gradients", type=yes, default=True, metavar="yes|no", help="reduced during the backward pass")


COMMANDS = {
    "plan": "the fastest layouts that fit",
    "estimate": "memory and time of one layout",
    "emit": "launch command and configuration file of a layout, for a tool that trains",
    "scoreboard": "how good the planner is: published runs, each predicted without its own source",
    "calibrate": "measure this machine, and write constants for it",
    "probe": "a step that you have measured, for --constants: what is predicted for your cluster is scaled by it",
    "benchmark": "a grid of small trainings; with --run each is trained here and compared with what was predicted",
    "explain": "a configuration of another tool: what it means, its memory and time, and what is risky",
    "goodput": "the time until so many tokens are trained on machines that fail, and how often to checkpoint",
    "measure": "any torch.nn.Module of yours: what it keeps and computes, and which stage of ZeRO it fits under",
    "models": "shapes that have a name",
    "hardware": "GPUs and networks that have a name",
}


def read(argv: list[str]) -> argparse.Namespace:
    main, subs = parser()
    args, rest = main.parse_known_args(argv)
    if rest:
        subs[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    for name in ("output", "plot") if args.command not in ("probe", "calibrate") else ("out",):
        if file := getattr(args, name, None):
            require_writable(name, Path(file))
    return args


def require_writable(option: str, file: Path) -> None:
    """Raise UserError where the file can't be written, which is known now, and not only when all has been measured."""
    with writing(f"--{option} {file}"):
        there = file.exists()
        file.open("a").close()
        if not there:
            file.unlink()


def model_named(name: str) -> models.Model:
    """A model of the planner's table, or of a file that has its shape. Raises UserError."""
    if Path(name).suffix != ".json":
        return models.find(name)
    from planner import read_config

    config = read_config.read(name)
    if config.model is None:
        raise UserError(f"{name} ({config.kind}) has no shape of a model; give the config.json of one")
    return config.model


def model_of(args: argparse.Namespace) -> models.Model:
    names = ("layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary", "experts", "top_k", "expert_width",
             "shared_experts", "head_width", "mlp")  # fmt: skip
    given = {name: getattr(args, name) for name in names}
    if args.model is None and (args.mlp or "gelu") == "gelu":
        given |= {"bias": "all", "positions": args.sequence, "tied": True}
    model = models.custom(model_named(args.model) if args.model else None, **given)
    return replace(model, expert_width=model.hidden) if model.experts and not model.expert_width else model


def cluster_of(args: argparse.Namespace) -> hardware.Cluster:
    gpu = args.gpu
    if gpu == "here":
        gpu = args.constants and constants.load(args.constants) and hardware.read_here(args.constants)
        if not gpu:
            raise UserError("--gpu here is what calibrate has measured; give its file with --constants")
    return cluster(gpu, args.gpus, args.gpus_per_node, args.network, args.adapters)


def precision_of(args: argparse.Namespace, gpu: hardware.GPU) -> str:
    if args.precision is None:
        return usual_precision(gpu)
    name = PRECISION_ALIASES.get(args.precision, args.precision)
    lookup(name, PRECISIONS, "precision")
    return name


def adapted(args: argparse.Namespace) -> dict:
    """What the options say of adapters, as fields of a layout."""
    lookup(args.lora_on, ON, "choice of linear layers")
    return {"lora": args.lora, "lora_on": args.lora_on, "nf4": args.nf4}


def named(args: argparse.Namespace) -> Estimate:
    """The estimate of the layout that the options name."""
    model, gpus = model_of(args), cluster_of(args)
    mesh = resolve(parse_axes(args.mesh), gpus.gpus) if args.mesh else {"data": gpus.gpus}
    stage = args.zero_stage if args.zero_stage is not None else 3 if mesh.get("shard", 1) > 1 else 0
    layout = make_layout(
        model, gpus, mesh, batch_size=args.batch_size, micro_batch=args.micro_batch, sequence=args.sequence,
        zero_stage=stage, schedule=SCHEDULE_ALIASES.get(args.schedule.lower(), args.schedule.lower()),
        stages_per_rank=args.stages_per_rank, recompute=args.recompute, recompute_layers=args.recompute_layers,
        precision=precision_of(args, gpus.gpu),
        offload=args.offload, sequence_parallel=args.sequence_parallel, flash=args.flash, fused=args.fused,
        fused_loss=args.fused_loss, dropout=args.dropout, async_tensor=args.async_tensor,
        whole_experts=args.whole_experts, ends=args.ends,
        attention=args.attention, balanced=args.balanced, overlap_gradients=args.overlap_gradients,
        framework=args.framework, **adapted(args),
    )  # fmt: skip
    return estimate(model, gpus, layout, constants.load(args.constants), args.max_memory_gb)


def run_estimate(args: argparse.Namespace) -> None:
    found = named(args)
    if args.json:
        print(json.dumps(found.as_dict(), indent=1))
        return
    print(one_layout(found))
    if args.explain:
        print("\n" + explain(found))


def planned(args: argparse.Namespace, count: int, tool: str | None = None) -> list:
    """The best layouts; of those that a tool can express, where one is named."""
    from planner.search import plan

    def expressed(found: Estimate) -> bool:
        try:
            return bool(emit(found, tool or ""))
        except UserError:
            return False

    for name in ("batch_size", "sequence"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    gpus = cluster_of(args)
    lookup(args.framework, FRAMEWORKS, "framework")
    return plan(
        model_of(args), gpus, args.batch_size, args.sequence, precision_of(args, gpus.gpu), args.max_memory_gb,
        count, constants.load(args.constants), expressed if tool else lambda _: True, args.framework, adapted(args),
    )  # fmt: skip


def recommended(args: argparse.Namespace) -> tuple[Estimate, list[str]]:
    """The first of `plan`, or, where the tool cannot express that, the first that it can; with a note then."""
    first = planned(args, 1)[0].estimate
    try:
        emit(first, args.format)
    except UserError as error:
        try:
            found = planned(args, 1, args.format)[0].estimate
        except UserError:
            raise UserError(f"{error} (which also refuses the other layouts that fit)") from None
        return found, [
            f"`plan` recommends {first.layout.describe()}, but {error}; this one takes "
            f"{found.seconds / first.seconds - 1:+.0%} time"
        ]
    return first, []


def run_plan(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise UserError(f"--count must be at least 1, not {args.count}")
    if args.gpu is None:
        compare_gpus(args)
        return
    chosen = planned(args, args.count)
    if args.plot:
        from planner.plot import picture

        picture([choice.estimate for choice in chosen], args.plot)
    if args.json:
        print(json.dumps([choice.as_dict() for choice in chosen], indent=1))
        return
    print(table(chosen))
    if args.explain:
        print("\n" + explain(chosen[0].estimate))


def compare_gpus(args: argparse.Namespace) -> None:
    """The best layout of each GPU of the table, for the same job."""
    from planner import compare

    given = compare.prices(args.price)
    offers = []
    for gpu in (gpu for gpu in hardware.GPUS.values() if not gpu.processor):
        args.gpu = gpu.name
        try:
            found = planned(args, 1)[0].estimate
        except UserError as error:
            offers.append(compare.Offer(gpu.name, None, why=str(error)))
        else:
            offers.append(compare.offer(gpu, found, given.get(gpu.name)))
    if not any(one.found for one in offers):
        raise UserError(offers[-1].why)
    if args.json:
        kept = ("gpu", "dollars", "kilowatt_hours", "why")
        print(json.dumps([{name: getattr(one, name) for name in kept} | (one.found.as_dict() if one.found else {})
                          for one in offers], indent=1))  # fmt: skip
        return
    print(compare.table(offers, args.by))


def run_goodput(args: argparse.Namespace) -> None:
    from planner import goodput

    if (args.tokens is None) != (args.tokens_per_second is None):
        raise UserError("--tokens and --tokens-per-second go together; give both, or none")
    work = None
    if args.tokens is not None:
        if not (args.tokens > 0 and args.tokens_per_second > 0):
            raise UserError("--tokens and --tokens-per-second must be more than 0")
        work = args.tokens / args.tokens_per_second
    interval = None if args.interval_minutes is None else 60 * args.interval_minutes
    found = goodput.goodput(
        args.gpus, args.failures, args.checkpoint_seconds, 60 * args.restart_minutes, interval,
        3600 * args.repair_hours, args.spares,
    )  # fmt: skip
    wall = {"wall_seconds": found.wall(work)} if work else {}
    print(json.dumps(vars(found) | wall, indent=1) if args.json else goodput.text(found, work))


def emitted(args: argparse.Namespace) -> tuple[Estimate, Emitted]:
    """The layout that is named or searched for, and its files. Raises UserError for what can't be written."""
    lookup(args.format, FORMATS, "format")
    args.framework = args.framework or FRAMEWORK_OF.get(args.format, FRAMEWORK)
    if args.lora or args.nf4:
        raise UserError(
            "emit writes trainings of all parameters, without --lora; 06_fsdp/with_qlora.py trains adapters"
        )
    layout = argparse.ArgumentParser(allow_abbrev=False)
    add_layout(layout.add_argument)
    given = [name for name, value in vars(layout.parse_args([])).items() if getattr(args, name) != value]
    if given and not args.mesh:
        raise UserError(f"--{given[0].replace('_', '-')} is of a layout that you name: add --mesh, or leave it out")
    one, notes = (named(args), []) if args.mesh else recommended(args)
    found = emit(one, args.format)
    found.notes[:0] = notes
    return one, found


def run_emit(args: argparse.Namespace) -> None:
    one, found = emitted(args)
    command = found.command
    if args.out:
        folder = Path(args.out)
        # This course's own script stays where it is.
        script = shlex.quote(str(ROOT / COURSE))
        command = f"cd {shlex.quote(args.out)} && {command.replace(COURSE, script)}"
        if JOB in found.files:
            found.files[JOB] = found.files[JOB].replace(COURSE, script)
        with writing(f"--out {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in found.files.items():
                (folder / name).write_text(text)
    if args.json:
        print(json.dumps(vars(found), indent=1))
        return
    print(f"layout: {predicted(one)}")
    for name, text in found.files.items():
        print(f"written to {Path(args.out, name)}" if args.out else f"--- {name}\n{text}")
    print("\n".join([*(f"note: {note}" for note in found.notes), command]))


def run_scoreboard(args: argparse.Namespace) -> None:
    from planner import scoreboard

    if args.refit:
        fitted, halves = scoreboard.refit()
        constants.save(fitted, halves=halves)
    lines = scoreboard.lines(args.every)
    found = scoreboard.scores(lines)
    print(json.dumps(found, indent=1) if args.json else scoreboard.text(found, lines if args.runs else None))


def run_calibrate(args: argparse.Namespace) -> None:
    from planner.calibrate import calibrate

    print(calibrate(args.out, args.ranks))


def run_probe(args: argparse.Namespace) -> None:
    """The file has constants as `--constants` takes them; a further probe of the same cluster counts beside the first,
    by their median."""
    if not args.seconds > 0:
        raise UserError(f"--seconds must be more than 0, not {args.seconds:g}")
    file, ratios = Path(args.out), []
    if file.exists():
        from planner.measured import probes_of

        ratios = probes_of(file)
    found = named(args)
    before = constants.load(args.constants)
    ratios.append(args.seconds / found.seconds * before.step)
    scaled = replace(before, step=median(ratios), source=f"{len(ratios)} measured step(s)")
    constants.save(scaled, file, probes=ratios)
    print(f"measured over predicted {ratios[-1]:.2f}, of {len(ratios)} probe(s) {scaled.step:.2f}: --constants {file}")


def run_benchmark(args: argparse.Namespace) -> None:
    from planner import benchmark

    for name in ("max_gpus", "steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    sizes = args.batch_size.split(",")
    if wrong := next((size for size in sizes if not size.isdecimal() or int(size) < 1), None):
        raise UserError(f"--batch-size: expected numbers of at least 1, not '{wrong}'")
    known = {name: precision for precision, name in as_course.PRECISION.items()}
    precisions = [lookup(name, known, "precision") for name in args.precision.split(",")]
    measured = args.constants and constants.load(args.constants) and hardware.read_here(args.constants)
    gpu, found = measured or "cpu", constants.load(args.constants)
    names = args.models.split(",")
    runs = [run for size in sizes for precision in precisions
            for run in benchmark.grid(names, args.max_gpus, gpu, found, int(size), precision)]  # fmt: skip
    if args.run:
        runs = benchmark.compare(runs, args.steps)
    if args.output:
        with writing(f"--output {args.output}"):
            Path(args.output).write_text(json.dumps(runs, indent=1) + "\n")
    print(json.dumps(runs, indent=1) if args.json or not args.run else benchmark.table(runs))


def run_explain(args: argparse.Namespace) -> None:
    from planner import explain_file, read_config

    config = read_config.read(args.file)
    model = model_named(args.model) if args.model else config.model
    if model is None:
        raise UserError(f"{args.file} ({config.kind}) has no shape of a model; give --model")
    args.gpus = args.gpus or config.gpus
    if args.gpus is None:
        raise UserError(f"{args.file} ({config.kind}) does not say how many GPUs; give --gpus")
    names = ("batch_size", "micro_batch", "sequence", "recompute", "zero_stage", "framework")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    gpus = cluster_of(args)
    if args.precision:
        given["precision"] = precision_of(args, gpus.gpu)
    layout = explain_file.layout_of(config, model, gpus, given)
    found = estimate(model, gpus, layout, constants.load(args.constants))
    if args.format:
        lookup(args.format, FORMATS, "format")
        for name, text in emit(found, args.format).files.items():
            print(f"--- {name}\n{text}")
    elif args.json:
        print(json.dumps(found.as_dict() | {"kind": config.kind, "risks": explain_file.risks(found, config)}, indent=1))
    else:
        print(explain_file.described(found, config, args.file))


def run_measure(args: argparse.Namespace) -> None:
    from common import own
    from planner import any_module

    gpu = cluster_of(argparse.Namespace(**vars(args), gpus_per_node=None, network=None, adapters=None)).gpu
    make, precision = own.named(args.what), precision_of(args, gpu)
    report = any_module.report(make, gpu, args.gpus, precision, constants.load(args.constants))
    print(json.dumps(report, indent=1) if args.json else any_module.table(report))


def run_models(args: argparse.Namespace) -> None:
    if args.json:
        found = [vars(model) | {"parameters": model.parameters} for model in models.MODELS.values()]
        print(json.dumps(found, indent=1))
        return
    for model in models.MODELS.values():
        active = f" ({model.active_parameters / 1e9:.1f} active)" if model.experts else ""
        shape = f"{model.layers:4} layers, width {model.width:6,}, {model.heads:3} heads"
        print(f"{model.name:16} {model.parameters / 1e9:8.2f} billion{active:14} {shape}   {model.source}")


def run_hardware(args: argparse.Namespace) -> None:
    if args.json:
        networks = {name: {"bytes_per_second": one.rate, "source": one.source} for name, one in (
            hardware.NETWORKS.items())}  # fmt: skip
        print(json.dumps({"gpus": [vars(gpu) for gpu in hardware.GPUS.values()], "networks": networks}, indent=1))
        return
    for gpu in hardware.GPUS.values():
        print(
            f"{gpu.name:12} {gpu.peak / 1e12:7,.1f} TFLOP/s  {gpu.memory / GIB:6.1f} GiB  {gpu.hbm / 1e12:5.2f} TB/s "
            f"{gpu.link / 1e9:5,.0f} GB/s to {gpu.gpus_per_node} in a node   {gpu.source}"
        )
    for name, one in hardware.NETWORKS.items():
        print(f"{name:16} {one.rate / 1e9:6.2f} GB/s per adapter   {one.source}")


RUN = {"plan": run_plan, "estimate": run_estimate, "emit": run_emit, "explain": run_explain, "goodput": run_goodput,
       "scoreboard": run_scoreboard, "calibrate": run_calibrate, "probe": run_probe, "benchmark": run_benchmark,
       "measure": run_measure, "models": run_models, "hardware": run_hardware}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(), contextlib.suppress(BrokenPipeError):  # of `| head`, which has read enough
        args = read(sys.argv[1:] if argv is None else argv)
        RUN[args.command](args)


if __name__ == "__main__":
    main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
