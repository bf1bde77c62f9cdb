"""The site's live pages in a browser: the Python there and ours give the same answers, and the keyboard is enough.

    python -m tools.site_live _site --inputs 2000

Random questions go through the page's own Python, as a click would send them, and through the one that runs this. What
is text or a whole number must be the same, other numbers to six digits. Exit code 1 with a line for each fault.
"""

import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common import installed, symptoms
from common.errors import Parser
from common.lab.site import served
from course.pipeline import game, schedules
from planner import hardware, models
from tools import site_cells
from tools.site_browser import chromium, pages_of, violations

DIGITS = 1e-6
AT_MOST = 500_000  # bytes of a page with all that is its own, beside the runtime
SYMPTOM = "everything stops when I write a checkpoint"
MOVED = ".sliders input[type=range]:enabled"  # the first of a page
LOADED = "document.documentElement.dataset.course"  # "live", or "still" where that failed


def question_to_the_planner(draw: random.Random) -> dict[str, str]:
    gpus = 2 ** draw.randrange(5)
    asked = {"gpus": str(gpus), "gpu": draw.choice([name for name, gpu in hardware.GPUS.items() if not gpu.processor]),
             "batch_size": str(gpus * 2 ** draw.randrange(4)), "sequence": str(2 ** draw.randrange(9, 14))}  # fmt: skip
    asked |= {"model": draw.choice([*models.MODELS, "lama-9b"])}
    if draw.random() < 0.3:
        width = 64 * draw.randrange(4, 80)
        config = {"model_type": draw.choice(["llama", "gpt2"]), "hidden_size": width,
                  "num_attention_heads": width // 64,
                  "num_hidden_layers": draw.randrange(1, 60), "vocab_size": draw.randrange(1000, 200_000)}  # fmt: skip
        asked["config"] = json.dumps(config)
    for name, options in (("network", list(hardware.NETWORKS)), ("price", ["2.5", "x"]), ("electricity", ["0.12"])):
        if draw.random() < 0.4:
            asked[name] = draw.choice(options)
    return asked


def question_to_the_game(draw: random.Random) -> dict[str, Any]:
    """A position of random moves, in one of ten an impossible one, and in one of five lists that are mixed up."""
    level = draw.choice(game.LEVELS)
    lists: schedules.Schedule = [[] for _ in range(level.ranks)]
    for _ in range(draw.randrange(60)):
        can = [(rank, action) for rank, own in enumerate(game.ready(level, lists)) for action, why in own.items()
               if not why]  # fmt: skip
        if not can:
            break
        rank, action = draw.choice(can)
        lists[rank].append(action)
    if draw.random() < 0.2:
        draw.shuffle(draw.choice(lists))
    asked: dict[str, Any] = {"level": level.name, "lists": [" ".join(map(str, own)) for own in lists]}
    if draw.random() < 0.1:
        asked |= draw.choice([{"place": "9F0"}, {"place": "0W0"}, {"place": "x"}, {"back": 0}, {"level": "none"}])
    return asked


# module -> what makes a question to it, and how many of a thousand questions go there: a search takes seconds
QUESTIONS: dict[str, tuple[Callable[[random.Random], dict[str, Any]], int]] = {
    "planner.page": (question_to_the_planner, 50),
    "course.pipeline.game_page": (question_to_the_game, 950),
}


def unlike(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Where two answers differ by more than rounding. The HTML is made of the same numbers, and rounds them."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs} - {"html"}):
            yield from unlike(ours.get(name), theirs.get(name), f"{where}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from unlike(one, other, f"{where}[{place}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=DIGITS, abs_tol=1e-12):
            yield f"{where}: {ours!r} here, {theirs!r} on the page"
    elif ours != theirs:
        yield f"{where}: {str(ours)[:80]!r} here, {str(theirs)[:80]!r} on the page"


def same_answers(page, count: int, seed: int) -> list[str]:
    draw, faults = random.Random(seed), []
    for module, (ask, share) in QUESTIONS.items():
        number = max(3, count * share // 1000)
        errors = 0
        for _ in range(number):
            question = json.dumps(ask(draw))
            theirs = json.loads(page.evaluate("([module, text]) => course.call(module, text)", [module, question]))
            ours = json.loads(import_module(module).reply(question))
            errors += "error" in ours
            faults += [f"{module} {question}: {fault}" for fault in [*unlike(ours, theirs)][:3]]
        print(f"{module}: {number} random questions, {errors} of which are refused; {len(faults)} answers differ")
        faults += [f"{module}: every question was refused"] if errors == number else []
    return faults


def opened(browser, address: str, name: str, kind: str, **settings) -> tuple[Any, list[str]]:
    """A live page when its Python is there, and the list into which errors of its console go."""
    page = browser.new_page(**settings)
    errors: list[str] = []
    page.on(
        "console",
        lambda message: errors.append(f"{message.text} {message.location['url']}") if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route(lambda url: not url.startswith(address), lambda route: route.abort())  # no network is needed
    page.goto(f"{address}/{name}", wait_until="load")
    if kind == "symptoms":  # without Python
        return page, errors
    if kind == "sliders":  # wait until somebody wants them; a question may stand before them
        page.eval_on_selector_all("form.predict .skip", "buttons => buttons.forEach(one => one.click())")
        page.focus(MOVED)
        page.keyboard.press("ArrowRight")
    page.wait_for_function(LOADED, timeout=300_000)
    if page.evaluate(LOADED) != "live":
        errors.append(page.inner_text(".live .state"))
    return page, errors


def by_keyboard_planner(page) -> list[str]:
    """From the field of GPUs, without a mouse: another number, an answer, and its address."""
    before = page.inner_text(".answer .heading")
    page.focus("input[name=gpus]")
    page.keyboard.press("Control+A")
    page.keyboard.type("8")
    page.keyboard.press("Enter")
    page.wait_for_function("before => document.querySelector('.answer .heading').textContent != before", arg=before,
                           timeout=120_000)  # fmt: skip
    found = [] if "gpus=8&" in page.url else [f"the address does not keep the question: {page.url}"]
    page.focus("input[name=gpus]")
    page.keyboard.type("x")
    page.keyboard.press("Enter")
    page.wait_for_selector(".state.wrong", timeout=60_000)
    return found + ([] if "'8x'" in page.inner_text(".state") else ["a wrong number is not named"])


def by_keyboard_game(page) -> list[str]:
    """The second level, played to its end by Tab and Enter alone: the first of what is lit, each time."""
    page.focus("button[data-name=pick1]")
    page.keyboard.press("Enter")
    page.wait_for_selector("button[data-name=pick1].picked")
    for _ in range(100):
        before = page.inner_html(".answer")
        for _ in range(60):
            if page.evaluate("document.activeElement.className == 'lit'"):
                break
            page.keyboard.press("Tab")
        else:
            break
        page.keyboard.press("Enter")
        page.wait_for_function("before => document.querySelector('.answer').innerHTML != before", arg=before)
        if "Done after" in page.inner_text(".answer"):
            return [] if "course.pipeline.play" in page.inner_text(".answer") else ["no command that runs it"]
    return ["the keyboard did not come to the end of a level"]


# The values of a form as live.js sends them, and whether the picture that is shown is this one.
VALUES = """lab => Object.fromEntries([...lab.querySelectorAll("form [name]")].map(
    one => [one.name, one.type === "checkbox" ? String(one.checked) : one.value]))"""
IS_SHOWN = """(lab, html) => { const one = document.createElement("div"); one.innerHTML = html;
    return one.innerHTML === lab.querySelector(".answer").innerHTML }"""


def by_keyboard_sliders(page) -> list[str]:
    """Each control of all sliders is moved to its ends. What is shown then is what this Python draws of the same
    values; a slider says where it is, and some control of each picture changes it."""
    page.wait_for_selector(".live .answer svg", timeout=60_000)
    faults: list[str] = []
    asked: list[dict[str, Any]] = []
    shown: list[str] = []
    for lab in page.query_selector_all("[data-live=sliders]"):
        cell, first = lab.get_attribute("data-cell"), len(shown)
        for control in lab.query_selector_all("form [name]"):
            kind, values = control.get_attribute("type"), []
            keys = {"checkbox": ("Space", "Space"), "range": ("End", "Home", "ArrowRight")}
            for key in keys.get(kind, ("Home", "ArrowDown")):
                if control.is_disabled():
                    continue
                control.focus()
                page.keyboard.press(key)
                asked.append({"cell": cell, "values": lab.evaluate(VALUES)})
                # the worker answers in order: so what the key has asked for is shown before
                reply = page.evaluate("text => course.call('page_sliders', text)", json.dumps(asked[-1]))
                shown.append(json.loads(reply)["html"])
                values.append(control.get_attribute("aria-valuetext"))
                faults += [] if lab.evaluate(IS_SHOWN, shown[-1]) else [f"{asked[-1]}: not what is shown"]
            if kind == "range" and values and values[0] == values[1]:
                faults.append(f"{cell}: {control.get_attribute('name')} does not say where it is")
        faults += [f"{cell}: nothing changes its picture"] if len({*shown[first:]}) < 2 else []
    for question, ours, theirs in zip(asked, drawn_here(asked), shown, strict=True):
        faults += [] if same_text(ours, theirs) else [f"{question}: the page draws something else than we do"]
    print(f"{len(asked)} positions of sliders, compared with what is drawn here")
    return faults


def drawn_here(asked: list[dict[str, Any]]) -> list[str]:
    """What this Python draws, in a process that has what a browser has."""
    program = f"import json, page_sliders as p\nprint(json.dumps([p.reply(json.dumps(one)) for one in {asked!r}]))"
    with tempfile.TemporaryDirectory() as folder:
        site_cells.laid_out(Path(folder))
        return [json.loads(reply)["html"] for reply in json.loads(site_cells.alone(program, Path(folder)))]


def same_text(ours: str, theirs: str) -> bool:
    """Whether two texts are the same, their numbers to six digits."""
    number = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    one, other = (list(map(float, re.findall(number, text))) for text in (ours, theirs))
    return re.sub(number, "0", ours) == re.sub(number, "0", theirs) and not [*unlike(one, other)]


def by_keyboard_symptoms(page) -> list[str]:
    """What the doctor answers stands first, each place is a link that leads somewhere, and the page finds what we find
    for questions of words that are drawn from everything that is searched."""
    found = page.eval_on_selector_all(".symptoms li a", "links => links.map(one => [one.textContent, one.href])")
    ours = [place.what[:160] for place in symptoms.find(SYMPTOM, len(found))]
    faults = [] if found and [text for text, _ in found] == ours else [f"the doctor finds {ours}, not {found}"]
    faults += [f"{link} leads nowhere" for _, link in found if page.request.get(link).status != 200]
    draw, known = random.Random(0), sorted({*symptoms.ALSO, *" ".join(p.text for p in symptoms.all_places()).split()})
    ends = ["", "", "", *symptoms.ENDINGS, "'s", "ping", "ı"]  # of words that no page has
    asked = [
        " ".join(word + draw.choice(ends) for word in draw.sample(known, draw.randrange(1, 12))) for _ in range(2000)
    ]
    theirs = page.evaluate("asked => asked.map(words => findSymptom(words, 6).map(one => one.where))", asked)
    differ = [words for words, places in zip(asked, theirs, strict=True)
              if places != [place.where for place in symptoms.find(words, 6)]]  # fmt: skip
    fit = page.evaluate("asked => asked.map(symptomFits)", asked)
    differ += [words for words, does in zip(asked, fit, strict=True) if does != symptoms.fits(words)]
    print(f"search: {len(asked)} random questions; {len(differ)} are answered otherwise than by the doctor")
    return faults + [f"the doctor finds other places for {words!r}" for words in differ[:3]]


KEYBOARD: dict[str, Callable[[Any], list[str]]] = {
    "planner": by_keyboard_planner,
    "game": by_keyboard_game,
    "sliders": by_keyboard_sliders,
    "symptoms": by_keyboard_symptoms,
}


def weight(folder: Path, path: Path) -> int:
    """Bytes of a live page and its scripts; the theme, and the runtime with the course's modules, are shared by all."""
    own = [path, *(folder / "_static" / name for name in ("live.js", "predict.js", "worker.js", "style.css"))]
    return sum(file.stat().st_size for file in own)


def live_page(browser, address: str, name: str, kind: str, inputs: int, seed: int) -> list[str]:
    """The faults of one page, on a phone and in the dark."""
    query = f"?q={quote(SYMPTOM)}" if kind == "symptoms" else ""
    page, errors = opened(
        browser, address, name + query, kind, viewport={"width": 360, "height": 740}, color_scheme="dark"
    )
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    found = [f"{wide} pixels wider than a phone"] if wide > 0 else []
    if kind == "symptoms" or page.evaluate(LOADED) == "live":
        found += KEYBOARD[kind](page)
    if kind == "planner":
        found += same_answers(page, inputs, seed)
    found += [f"the console says {error}" for error in errors]
    # Last: axe asks for style sheets at addresses of its own, and the console says that they are not there.
    for violation in violations(page):
        found.append(f"dark: {violation['id']}, first {violation['nodes'][0]['html'][:120]}")
    page.close()
    return found


def live_pages(folder: Path, inputs: int = 100, seed: int = 0, only: str = "") -> list[str]:
    """A line for each fault of the pages that are live, of those in whose names `only` is."""
    from playwright.sync_api import Error as PlaywrightError
    from playwright.sync_api import sync_playwright

    found = []
    marks = re.compile(r'data-live="(\w+)"|<section class="(symptoms)"')
    marked = {path: marks.search(path.read_text()) for path in pages_of(folder) if only in str(path)}
    kinds = {path: mark[1] or mark[2] for path, mark in marked.items() if mark}
    with served(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for path, kind in kinds.items():
            name = str(path.relative_to(folder))
            print(f"{name}: {weight(folder, path) / 1e3:.0f} kB beside the runtime", flush=True)
            found += [f"{name}: more than {AT_MOST:,} bytes"] if weight(folder, path) > AT_MOST else []
            try:
                faults = live_page(browser, address, name, kind, inputs, seed)
            except PlaywrightError as error:  # such as a time limit: the other pages are looked at all the same
                faults = [f"stopped: {str(error).splitlines()[0]}"]
            faults = [f"{name}: {fault}" for fault in faults]
            print(*faults, f"{name}: {len(faults)} faults", sep="\n", flush=True)
            found += faults
        browser.close()
    return found if kinds else ["no page of the site is live"]


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inputs", type=int, default=100, help="random questions, of which one in twenty is a search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="pages in whose names this is")
    args = parser.asked(argv)
    faults = live_pages(args.folder.resolve(), args.inputs, args.seed, args.only)
    print(*faults, f"live pages: {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    installed.at_start(("playwright", "axe_playwright_python"), "requirements-site.txt")
    sys.exit(main(sys.argv[1:]))
