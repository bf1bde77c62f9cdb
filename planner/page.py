"""The planner as a page: a question from an address or a form, its answer as numbers, and the answer as HTML.

The same functions run when the site is built, which stores the page as it is first seen, and in the reader's browser,
which then asks them again for each change. Nothing on the page is computed anywhere else.
"""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from html import escape
from statistics import median
from typing import Any

from common.errors import UserError
from planner import compare, constants, explain_file, hardware, models, network, scoreboard
from planner.estimate import Estimate
from planner.fit import project
from planner.layout import usual_precision
from planner.models import Model
from planner.output import WITH_CARE, seconds
from planner.read_config import hugging_face
from planner.search import Choice, plan

FIRST = {"model": "llama-3-8b", "gpu": "h100-80gb", "gpus": "16", "batch_size": "64", "sequence": ""}
USUAL = 8192  # tokens of a sequence where none are given, if the model takes so many
MOST_GPUS = 4096  # a search over more takes a browser minutes
COLOURS = ("parameters", "activations", "gradients", "optimizer", "gathered", "logits and loss", "unsharded gradients")
DRAWN = ("parameters", "gradients", "optimizer", "gathered", "unsharded gradients", "activations", "logits and loss")
TIMES = {"work": ("computation", 0), "messages in layers": ("waiting for messages in layers", 1),
         "messages of state": ("waiting for gradients or parameters", 5), "bubble": ("bubble", 7),
         "optimizer": ("optimizer", 3)}  # fmt: skip # part of a step -> what it is called here, and its colour
WORDS = {"ZeRO-1, 2, 3": "zero", "shard": "shard", "micro-batch": "micro-batch", "recompute": "recomputation",
         "MFU": "model-flops-utilization", "tensor": "tensor-parallelism", "pipeline": "pipeline-parallelism",
         "context": "context-parallelism", "activations": "activation", "optimizer": "optimizer-state",
         "kept by the allocator": "caching-allocator", "bubble": "bubble"}  # fmt: skip # word here -> the glossary's
ALIKE = 12  # published runs of which the usual error is taken; three are shown


# --- the question -----------------------------------------------------------------------------------------------------


def number(asked: dict[str, str], name: str, least: int = 1, most: int = 2**40, usual: int = 0) -> int:
    text = str(asked.get(name) or FIRST[name] or usual).strip()
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UserError(f"{name.replace('_', ' ')}: expected a whole number from {least} to {most:,}, not '{text}'")
    return int(text)


def price(asked: dict[str, str], name: str) -> float | None:
    """A price that was typed; None for an empty field."""
    text = str(asked.get(name) or "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found < 1e6:
        raise UserError(f"{name.replace('_', ' ')}: expected dollars, as 2.5, not '{text}'")
    return found


def model_of(asked: dict[str, str]) -> Model:
    """The model of a config.json that was dropped, whose name is `file`; of a shape in the address; or of that name.
    Raises UserError."""
    if asked.get("config"):
        file = asked.get("file") or "config.json"
        try:
            table = json.loads(asked["config"])
        except ValueError as error:
            raise UserError(f"{file}: not JSON ({error})") from None
        if not isinstance(table, dict):
            raise UserError(f"{file}: expected names and values, as a model's config.json has them")
        try:
            return hugging_face(table).model or models.find(FIRST["model"])
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
    if asked.get("shape"):
        try:
            return Model(**checked(json.loads(asked["shape"])))
        except (ValueError, TypeError):
            raise UserError(f"shape: no model: '{asked['shape'][:60]}'") from None
    return models.find(asked.get("model") or FIRST["model"])


def checked(shape: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Model that an address has. Raises ValueError for what is of another type."""
    kinds = {"name": str, "mlp": str, "bias": str, "source": str, "tied": bool}
    for name, value in shape.items():
        if type(value) is not kinds.get(name, int) or (type(value) is int and not 0 <= value < 2**40):
            raise ValueError(name)
    return shape


def shape_of(model: Model) -> dict[str, Any]:
    """What of a model is not the default, for an address."""
    values = {field.name: getattr(model, field.name) for field in fields(Model)}
    defaults = {field.name: field.default for field in fields(Model) if field.default is not MISSING}
    return {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}


# --- the answer -------------------------------------------------------------------------------------------------------


def state_of(asked: dict[str, str], model: Model) -> dict[str, str]:
    """The question for an address, with the shape of a model that came as a file."""
    state = {name: str(asked.get(name) or FIRST[name]).strip() for name in FIRST}
    state |= {name: str(asked[name]).strip() for name in ("network", "price", "electricity") if asked.get(name)}
    if asked.get("config") or asked.get("shape"):
        state = {"shape": json.dumps(shape_of(model), separators=(",", ":"))} | state
        del state["model"]
    return state


def answer(asked: dict[str, str]) -> dict[str, Any]:
    """What the page shows, as numbers: the layouts, best first, and the published runs that are most like the first.

    asked: fields of the form, all as text; what is missing is as in FIRST. Raises UserError.
    """
    model = model_of(asked)
    cluster = hardware.cluster(
        asked.get("gpu") or FIRST["gpu"], number(asked, "gpus", most=MOST_GPUS), network=asked.get("network") or None
    )
    of_hour, of_kwh = price(asked, "price"), price(asked, "electricity")
    batch, sequence = number(asked, "batch_size"), number(asked, "sequence", usual=min(model.context or USUAL, USUAL))
    chosen = plan(model, cluster, batch, sequence, usual_precision(cluster.gpu))
    longer = f", more than the {model.context:,} of its configuration" if 0 < model.context < sequence else ""
    return {
        "state": state_of(asked, model),
        "heading": f"{model.name}: {model.parameters / 1e9:,.2f} billion parameters on {cluster.gpus} x "
        f"{cluster.gpu.name} over {cluster.name}, {usual_precision(cluster.gpu)}; {batch:,} sequences of "
        f"{sequence:,} tokens a step{longer}",
        "layouts": [of_layout(choice, of_hour, of_kwh) for choice in chosen],
        "alike": published(chosen[0].estimate),
        "command": command(asked, model, batch, sequence, cluster),
    }


def command(asked: dict[str, str], model: Model, batch: int, sequence: int, cluster: hardware.Cluster) -> str:
    """The question for a command line; "" for a model that came as a file."""
    if asked.get("config") or asked.get("shape"):
        return ""
    network = f" --network {asked['network']}" if asked.get("network") else ""
    return (f"python -m planner plan --model {model.name} --gpus {cluster.gpus} --gpu {cluster.gpu.name}{network} "
            f"--batch-size {batch} --sequence {sequence}")  # fmt: skip


def of_layout(choice: Choice, of_hour: float | None, of_kwh: float | None) -> dict[str, Any]:
    """One layout. dollars and kilowatt_hours: of 10^9 tokens; None where there is no price, or no power. links: axis
    -> nodes of a group along it, and the share of what its ranks send that leaves their nodes."""
    found = choice.estimate
    if of_hour is None and found.cluster.gpu.name in compare.PRICES:
        of_hour = compare.PRICES[found.cluster.gpu.name][0]
    offer = compare.offer(found.cluster.gpu, found, of_hour)
    power = offer.kilowatt_hours * of_kwh if offer.kilowatt_hours is not None and of_kwh is not None else None
    links = {axis: network.outside(found.cluster, found.layout, found.constants, axis) for axis in found.step.links}
    more = {"layout": found.layout.describe(), "links": links, "price": of_hour, "dollars": offer.dollars,
            "kilowatt_hours": offer.kilowatt_hours, "dollars_of_energy": power}  # fmt: skip
    return choice.as_dict() | more


def published(found: Estimate) -> dict[str, Any]:
    """The nearest published runs. Each is predicted with constants that were fitted on the half of the sources that it
    is not in, as on the scoreboard."""
    halves = constants.load_halves()
    lines = []
    for run in explain_file.alike(found, ALIKE):
        own = int(project(run.source) not in halves[0][0])
        lines.append(scoreboard.predict(run, halves[1 - own][1], halves[own][1]))
    errors = [line.time_error for line in lines if line.time_error is not None]
    shown = [
        {"source": line.run.source, "what": f"{line.run.model.name} on {line.run.cluster.gpus} x "
         f"{line.run.cluster.gpu.name}, {line.run.layout.describe()}", "measured": line.run.seconds,
         "predicted": line.seconds, "error": line.time_error} for line in lines[:3]
    ]  # fmt: skip
    return {"runs": shown, "of": len(errors), "usual": median(map(abs, errors)),
            "inside": sum(bool(line.inside) for line in lines)}  # fmt: skip


def reply(text: str) -> str:
    """What the browser gets for a question as JSON: HTML to show, and the state for the address. Where there is no
    answer, an error, and the state if the model is known: so a model that needs more GPUs stays while one asks on."""
    asked = json.loads(text)
    known: dict[str, Any] = {}
    try:
        known["state"] = state_of(asked, model_of(asked))
        found = answer(asked)
    except UserError as error:
        return json.dumps(known | {"error": str(error)})
    return json.dumps({"html": html(found), "state": found["state"], "answer": found})


# --- as HTML ----------------------------------------------------------------------------------------------------------


def html(found: dict[str, Any]) -> str:
    """The answer as it stands on the page."""
    shown = found["layouts"]
    most = max(max(one["memory_gib_high"], one["memory_limit_gib"]) for one in shown)
    longest = max(one["step_seconds_high"] for one in shown)
    kinds = ["<li>" if one["trusted"] else '<li class="doubtful">' for one in shown]
    items = [f"{kind}{of_one(one, most, longest)}</li>" for kind, one in zip(kinds, shown, strict=True)]
    trusted = sum(one["trusted"] for one in shown)
    lists = f'<ol class="layouts">{"".join(items[:trusted])}</ol>' if trusted else ""
    if trusted < len(shown):
        lists += f'<p class="care">{escape(WITH_CARE.capitalize())}</p>'
        lists += f'<ol class="layouts" start="{trusted + 1}">{"".join(items[trusted:])}</ol>'
    words = ", ".join(f'<a href="glossary.html#{anchor}">{word}</a>' for word, anchor in WORDS.items())
    return (
        f'<p class="heading">{escape(found["heading"])}</p><p class="note">Words: {words}.</p>'
        f"{lists}{near(found['alike'])}{at_home(found['command'])}"
    )


def at_home(asked: str) -> str:
    """How to ask on, and to start the first layout, in a clone of the course."""
    if not asked:
        return ""
    return (
        '<h3>And now?</h3><p>In <a href="../README.html#begin">the course\'s folder</a>, this command answers the '
        "same. With <code>emit --format torchtitan</code> in place of <code>plan</code> it writes what starts the "
        'first layout; <a href="#on-the-command-line">other tools</a> have formats, too, and what one cannot express '
        "is refused.</p>"
        f"<pre><code>{escape(asked)}</code></pre>"
    )


def stacked(parts: list[tuple[str, float, str]], whole: float) -> str:
    """(what it is, size, class) as pieces of a bar that is `whole` long."""
    return "".join(f'<i class="{kind}" style="width:{100 * size / whole:.3f}%"></i>' for _, size, kind in parts)


def legend(parts: list[tuple[str, float, str]], text_of: Callable[[float], str]) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{escape(name)} {text_of(size)}</li>' for name, size, kind in parts)
    return f'<ul class="legend">{items}</ul>'


def of_one(one: dict[str, Any], most: float, longest: float) -> str:
    sizes = one["memory_parts_gib"]
    order = [*(name for name in DRAWN if name in sizes), *sorted({*sizes} - {*DRAWN})]  # the same in every bar
    parts = [(name, sizes[name], f"c{COLOURS.index(name) if name in COLOURS else 7}") for name in order
             if sizes[name] > 0.005 * most]  # fmt: skip
    parts.append(("kept by the allocator", max(0.0, one["memory_gib"] - sum(sizes.values())), "rest"))
    amounts = ", ".join(f"{name} {size:.1f}" for name, size, _ in parts)
    times = [(TIMES[name][0], size, f"c{TIMES[name][1]}") for name, size in one["step_parts_seconds"].items()
             if size > 0.002 * longest]  # fmt: skip
    low, high = one["step_seconds_low"], one["step_seconds_high"]
    interval = f"{seconds(one['step_seconds'])}, from {seconds(low)} to {seconds(high)}"
    limit = f"{one['memory_limit_gib']:.1f} GiB"
    facts = [f"{one['tokens_per_second']:,.0f} tokens/s, MFU {one['mfu']:.1%}", *money(one)]
    facts += [f"A GPU sends {size / 1e9:,.2f} GB a step along {axis}, {crossed(axis, size, *one['links'][axis])}"
              for axis, size in one["sent_bytes_per_gpu"].items()]  # fmt: skip
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in [one["preferred"], *one["notes"]] if note)
    return (
        f'<h3>{escape(one["layout"])}</h3><div class="sides"><div>'
        f"<p>Memory: {one['memory_gib']:.1f} GiB ({one['memory_gib_low']:.1f} to {one['memory_gib_high']:.1f}) of "
        f"{limit}, at its peak in {escape(one['memory_phase'])}</p>"
        f'<div class="bar" role="img" aria-label="Memory of a GPU in GiB: {escape(amounts)}; it has {limit}">'
        f'{stacked(parts, most)}<b style="left:{100 * one["memory_limit_gib"] / most:.3f}%"></b></div>'
        f"{legend(parts, lambda size: f'{size:.1f} GiB')}</div><div>"
        f"<p>Step: {interval}</p>"
        f'<div class="bar" role="img" aria-label="Time of a step: {interval}">{stacked(times, longest)}'
        f'<u style="left:{100 * low / longest:.3f}%;width:{100 * (high - low) / longest:.3f}%"></u></div>'
        f"{legend(times, seconds)}</div></div>"
        f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul>'
        f'<p class="note">The nearest one that lost: {escape(one["nearest_alternative"])}</p>{notes}'
    )


def crossed(axis: str, size: float, nodes: int, share: float) -> str:
    """Over which links it goes."""
    if nodes == 1:
        return "over PCIe" if axis == "host" else "all of it inside its node"
    return f"over {nodes} nodes: {size * share / 1e9:,.2f} GB of it by the network"


def money(one: dict[str, Any]) -> list[str]:
    found = []
    if one["dollars"] is not None:
        found.append(f"${one['dollars']:,.0f} for a billion tokens, at ${one['price']:g} per GPU-hour")
    else:
        found.append("No price of this GPU is in the table: type dollars per GPU-hour")
    if one["kilowatt_hours"] is not None:
        cost = f", ${one['dollars_of_energy']:,.2f}" if one["dollars_of_energy"] is not None else ""
        found.append(f"{one['kilowatt_hours']:,.0f} kWh{cost} for a billion tokens, at the data sheet's power")
    return found


def near(alike: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(run['source'])}: {escape(run['what'])}</td>"
        + "".join(
            f'<td class="number">{one}</td>'
            for one in (seconds(run["measured"]), seconds(run["predicted"]), f"{run['error']:+.0%}")
        )  # fmt: skip
        + "</tr>"
        for run in alike["runs"]
    )
    return (
        "<h3>How far this can be trusted</h3>"
        f"<p>On the {alike['of']} published runs that are most like the first layout, each predicted by constants that "
        f"were fitted without its source, the planner is off by {alike['usual']:.0%} (the median), and "
        f"{alike['inside']} of them lie in the interval that it states. The nearest three:</p>"
        '<div class="wide" tabindex="0" role="region" aria-label="Published runs"><table><thead><tr><th>run</th>'
        f"<th>measured</th><th>predicted</th><th>error</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def form() -> str:
    """The fields of the question, filled in as in FIRST."""

    def choose(name, label, options, empty=None):
        first = [f'<option value=""{" hidden" * (name in FIRST)}>{empty}</option>'] if empty else []
        listed = "".join(
            [*first, *(f"<option{' selected' * (one == FIRST.get(name))}>{escape(one)}</option>" for one in options)]
        )
        return f'<label>{label} <select name="{name}">{listed}</select></label>'

    def fill(name, label, hint=""):
        kind = 'inputmode="decimal"' if hint else 'inputmode="numeric"'
        return (f'<label>{label} <input name="{name}" {kind} size="7" autocomplete="off" placeholder="{hint}" '
                f'value="{FIRST.get(name, "")}"></label>')  # fmt: skip

    return (
        '<form class="question"><input type="hidden" name="shape">'
        + choose("model", "Model", models.MODELS, empty="the file's")
        + '<label>or a config.json, chosen or dropped here <input type="file" name="config" accept=".json"></label>'
        + fill("gpus", "GPUs")
        + choose("gpu", "Kind of GPU", [name for name, gpu in hardware.GPUS.items() if not gpu.processor])
        + choose("network", "Network between nodes", hardware.NETWORKS, empty="its usual one")
        + fill("batch_size", "Sequences per step")
        + fill("sequence", "Tokens of a sequence", "model's")
        + fill("price", "Dollars per GPU-hour", "table's")
        + fill("electricity", "Dollars per kWh", "none")
        + '<button disabled>Plan</button><p class="state" role="status"></p></form>'
    )


def stored() -> str:
    """The page's form and the answer to it, as the site stores them."""
    return f'{form()}<div class="answer">{html(answer({}))}</div>'
