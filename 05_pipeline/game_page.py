"""The schedule game as a page: a position from a click or an address, and what is shown of it as HTML."""

import json
from html import escape

from common.errors import UserError
from course.pipeline import game, schedules

LAB = "../05_pipeline/02_schedule_lab.html"  # where schedules are drawn beside each other
EXPLAINED = {"gpipe": "glossary.html#gpipe", "1f1b": "glossary.html#1f1b", "interleaved": "glossary.html#interleaving",
             "zb-h1": "glossary.html#zero-bubble", "zbv": "glossary.html#zero-bubble"}  # fmt: skip
BEFORE_PAR = 1.4  # the board is so much longer than par, until a schedule is longer


def position(asked: dict) -> tuple[game.Level, schedules.Schedule]:
    """The level and its lists, after the move that was asked for: `place` an action on a rank, or take its last off.
    Raises UserError."""
    level = game.level(asked.get("level") or game.LEVELS[0].name)
    given = asked.get("lists") or []
    if isinstance(given, str):
        given = given.split("/")
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise UserError("lists: expected the actions of each rank, as 0F0 0F1 / 1F0 1F1")
    if len(given) > level.ranks:
        raise UserError(f"{len(given)} lists for {level.ranks} ranks; give one for each")
    lists = [schedules.parse(text) for text in given] + [[] for _ in range(level.ranks - len(given))]
    if asked.get("place"):
        (action,) = schedules.parse(str(asked["place"]))
        if action.stage >= len(level.rank_of):
            raise UserError(f"stage {action.stage}: there are {len(level.rank_of)}")
        lists[level.rank_of[action.stage]].append(action)
    if asked.get("back") is not None:
        lists[int(asked["back"])][-1:] = []
    return level, lists


def reply(text: str) -> str:
    """What the browser gets for a question as JSON: HTML to show, and the state for the address; or an error."""
    try:
        level, lists = position(json.loads(text))
        found = game.judge(level, lists)
    except UserError as error:
        return json.dumps({"error": str(error)})
    state = {"level": level.name, "lists": "/".join(found["lists"])}
    return json.dumps({"html": html(level, found), "state": state, "answer": found})


def stored() -> str:
    """The page as it is first seen: the first level, in which nothing is placed yet."""
    level, lists = position({})
    return f'<div class="answer">{html(level, game.judge(level, lists))}</div>'


def html(level: game.Level, found: dict) -> str:
    length = max(found["makespan"], BEFORE_PAR * level.par)
    rows = "".join(row(level, found, rank, length) for rank in range(level.ranks))
    limits = [f"store {level.most} activations"] if level.most else []
    limits += [f"gather parameters {level.gathers} times"] if level.gathers else []
    limit = f"; a rank may {' and '.join(limits)}" if limits else ""
    picks = "".join(
        button({"level": one.name}, one.name, f"pick{number}", "picked" * (one is level))
        for number, one in enumerate(game.LEVELS)
    )
    waits = "".join(
        f"<li>rank {rank}, {start:g} to {end:g}: {escape(why)}</li>" for rank, start, end, why in found["idle"]
    )
    return (
        f'<div class="levels">{picks}</div>'
        f"<p>{level.ranks} ranks, {len(level.rank_of)} stages, {level.microbatches} micro-batches{limit}. "
        f"{escape(level.hint)}</p>{rows}{verdict(level, found)}"
        f"<h3>Why ranks are idle</h3><ul>{waits or '<li>no rank is</li>'}</ul>"
        f"{typed(level, found)}"
    )


def button(asked: dict, label: str, name: str, kind: str = "", off: str = "") -> str:
    closed = f' disabled title="{escape(off)}"' if off else ""
    return (f'<button type="button" class="{kind}" data-name="{name}" data-ask="{escape(json.dumps(asked))}"{closed}>'
            f"{escape(label)}</button>")  # fmt: skip


def row(level: game.Level, found: dict, rank: int, length: float) -> str:
    """A rank: its line of time, and buttons for what it can do next, those that are ready first."""

    def box(start, end, kind, text, why=""):
        at = f"left:{100 * start / length:.2f}%;width:{100 * (end - start) / length:.2f}%"
        return f'<span class="box {kind}" style="{at}" title="{escape(why or text)}">{text}</span>'

    boxes = "".join(box(start, end, action.lstrip("0123456789")[0], action)
                    for start, end, action in found["events"][rank])  # fmt: skip
    boxes += "".join(box(start, end, "idle", "", why) for who, start, end, why in found["idle"] if who == rank)
    base = {"level": level.name, "lists": found["lists"]}
    can = sorted(found["ready"][rank].items(), key=lambda pair: bool(pair[1]))
    if found["wrong"]:
        can = []
    buttons = "".join(button(base | {"place": action}, action, f"{rank}:{place}", "" if why else "lit", why)
                      for place, (action, why) in enumerate(can))  # fmt: skip
    if found["lists"][rank]:
        buttons += button(base | {"back": rank}, "take the last one off", f"{rank}:back")
    done = ", ".join(f"{action} from {start:g} to {end:g}" for start, end, action in found["events"][rank])
    par = f'<em style="left:{100 * level.par / length:.2f}%"></em>'
    return (
        f'<div class="rank"><b>rank {rank}</b><div class="line" role="img" '
        f'aria-label="rank {rank}: {done or "nothing"}">{boxes}{par}</div><div class="moves">{buttons}</div></div>'
    )


def verdict(level: game.Level, found: dict) -> str:
    """What is said of the position, and of a whole schedule how to run it."""
    if found["wrong"]:
        return f'<p class="wrong" role="alert">Illegal: {escape(found["wrong"])}.</p>'
    called = " or ".join(map(linked, found["names"]))
    if not found["whole"]:
        begun = f" So far it may become {called}." if called else ""
        return f"<p>Par is {level.par}: no schedule of this level is shorter.{begun}</p>{stuck(found)}"
    against = "which is par" if found["makespan"] == level.par else f"par is {level.par}"
    name = f" It is {called}." if called else " It has no name that this course knows."
    times = ", ".join(map(str, found["gathered"]))
    gathers = f" They gather parameters {times} times." if level.gathers else ""
    lists = " ".join(f'"{text}"' for text in found["lists"])
    return (
        f"<p><b>Done after {found['makespan']:g} units, {against}.</b> Ranks are idle for {found['bubble']:.0%} of the "
        f"time and store at most {', '.join(map(str, found['stored']))} activations.{gathers}{name}</p>"
        f"<p>Run it on {level.ranks} real ranks, which are compared with one process, in "
        '<a href="../README.html#begin">the course\'s folder</a>:</p>'
        f"<pre><code>python -m course.pipeline.play {escape(lists)}</code></pre>"
        f'<p><button type="button" data-copy>Copy the command</button></p>{following(level, found)}'
    )


def stuck(found: dict) -> str:
    """Where nothing can come next: what keeps each rank from its next actions. "" where something can."""
    if any(not why for own in found["ready"] for why in own.values()):
        return ""
    whys = [why for own in found["ready"] for why in dict.fromkeys(own.values()) if not why.startswith("needs")]
    return f'<p class="wrong" role="alert">Nothing can come next: {escape("; ".join(whys))}. Take something off.</p>'


def linked(name: str) -> str:
    """A schedule's name, with a link to what it means."""
    return f'<a href="{EXPLAINED.get(name, LAB)}">{escape(name)}</a>'


def following(level: game.Level, found: dict) -> str:
    """The way to the next level, and above par first the way back to the beginning of this one."""
    reached, place = found["makespan"] == level.par, game.LEVELS.index(level) + 1
    ways = "" if reached else button({"level": level.name}, "Try again", "again", "lit")
    if place < len(game.LEVELS):
        name = game.LEVELS[place].name
        ways += button({"level": name}, f"Next level: {name}", "next", "lit" if reached else "")
    return f"<p>{ways}</p>"


def typed(level: game.Level, found: dict) -> str:
    fields = "".join(
        f'<label>rank {rank} <input name="list" size="60" autocomplete="off" value="{escape(text)}"></label>'
        for rank, text in enumerate(found["lists"])
    )
    return (f'<details><summary>Write the lists</summary><form data-level="{escape(level.name)}">{fields}'
            "<button>Judge</button></form></details>")  # fmt: skip
