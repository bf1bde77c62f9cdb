"""The built site, page by page: links, pictures, and what a browser says of it.

    python -m tools.site_check _site

Links and pictures are checked in the HTML. Then Chromium opens every page: no error in its console, no serious
violation of accessibility (axe-core; in the light, and on a phone in the dark), nothing wider than a phone, at most
500 kB; every question can be answered and every flipbook turned by keyboard. Chromium is that of the system, or the one
that `playwright install chromium` fetches. Then come the pages that are live (tools/site_live.py). Exit code 0 if all
is well, 1 with a line for each fault, 2 where there is no browser, and nothing was looked at.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

from common import installed
from common.errors import Parser
from common.lab.site import served
from tools.site_browser import a_browser_is_there, chromium, pages_of, violations
from tools.site_live import live_pages

AT_MOST = 500  # kB of a page with all that is its own, beside the runtime


class Page(HTMLParser):
    """Where a page links to, what it shows, and the places in it that can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.ids = {""}
        self.faults: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.update(value for key in ("id", "name") if (value := found.get(key)))
        for key in ("href", "src"):
            if found.get(key) and not found[key].startswith(("data:", "javascript:")):
                self.links.append(found[key])
        if tag == "img" and not found.get("alt", "").strip() and found.get("role") != "presentation":
            self.faults.append(f"a picture without alternative text: {found.get('src', '')[:40]}")


def broken_links(folder: Path) -> list[str]:
    """A line for each link within the site that leads nowhere, and for each picture without a text."""
    pages = {path: Page(path.read_text()) for path in pages_of(folder)}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        found += [f"{name}: {fault}" for fault in page.faults]
        for link in page.links:
            if urlparse(link).scheme or link.startswith("//"):
                continue
            file, anchor = urldefrag(unquote(link).partition("?")[0])
            target = (path.parent / file).resolve() if file else path
            if not target.exists():
                found.append(f"{name}: {link} leads to no file")
            elif target in pages and anchor not in pages[target].ids:
                found.append(f"{name}: {link} leads to no place on that page")
    return sorted(set(found))


def weight(path: Path) -> int:
    """Bytes of a page and of the pictures that a browser loads with it. What all pages share stands in _static, and a
    picture with loading="lazy" comes when it is looked at."""
    text = path.read_text()
    sources = re.findall(r'<img (?![^>]*loading="lazy")[^>]*src="([^":]+)"', text)
    return len(text.encode()) + sum((path.parent / unquote(source)).stat().st_size for source in {*sources})


def seen(page: Any, name: str) -> list[str]:
    """A line for each fault of an opened page."""
    found = []
    shown = "images => images.filter(i => i.complete && i.offsetParent && !i.naturalWidth).length"
    missing = page.eval_on_selector_all("img", shown)
    found += [f"{name}: {missing} pictures are not shown"] if missing else []
    for violation in violations(page):  # with questions that are open
        where = violation["nodes"][0]["html"][:120]
        found.append(f"{name}: {violation['id']}, {len(violation['nodes'])} times, first {where}")
    if questions := page.query_selector_all("form.predict"):
        found += [f"{name}: {fault}" for fault in predicted(page, questions)]
    for number, book in enumerate(page.query_selector_all(".flipbook"), start=1):
        slider = book.query_selector("input")
        before = slider.input_value()
        slider.focus()
        page.keyboard.press("ArrowRight")
        if not slider.is_visible() or slider.input_value() == before:
            found.append(f"{name}: flipbook {number} does not turn")
        visible = len([f for f in book.query_selector_all(".flipbook-frame") if f.is_visible()])
        found += [f"{name}: flipbook {number} shows {visible} frames"] if visible != 1 else []
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    for violation in violations(page):
        found.append(f"{name}, dark, on a phone: {violation['id']}, first {violation['nodes'][0]['html'][:120]}")
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found + ([f"{name}: {wide} pixels wider than a phone"] if wide > 0 else [])


def predicted(page: Any, questions: list) -> Iterator[str]:
    """Answer every question by keyboard, the first one rightly: its cell's output is shown then, and not before."""
    hidden = "form => { let e = form; while (!e.matches('.cell')) e = e.nextElementSibling; " \
             "return e.querySelector('.cell_output').hidden }"  # fmt: skip
    for number, form in enumerate(questions):
        if not form.is_visible() or not form.evaluate(hidden):
            yield f"question {number} stands there with its answer"
        right = form.get_attribute("data-right")
        if right is None:
            form.query_selector("input").focus()
            page.keyboard.type(form.get_attribute("data-low") if number == 0 else "-1")
        else:
            choices = form.query_selector_all("input")
            choices[0].focus()
            page.keyboard.press("Space")
            place = next(at for at, one in enumerate(choices) if one.get_attribute("value") == right)
            for _ in range(place if number == 0 else (place + 1) % len(choices)):
                page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        verdict = form.query_selector(".verdict").inner_text()
        if not verdict.startswith("Right." if number == 0 else "Not quite."):
            yield f"question {number} is judged wrongly: {verdict[:60]}"
        last = number + 1 == len(questions) or not form.evaluate("form => form.nextElementSibling.matches('.predict')")
        if last and form.evaluate(hidden):
            yield f"question {number} is answered, and its output is hidden"
    score = page.inner_text(".predict-score .here")
    if score != f"1 of {len(questions)}":
        yield f"the score is {score}"
    with page.expect_download() as download:
        page.click(".predict-score .export")
    kept = json.loads(Path(download.value.path()).read_text())["predictions"]
    page.reload(wait_until="load")
    if len(kept) != len(questions) or page.inner_text(".predict-score .here") != score:
        yield "answers are not kept, or not in the file"


def seen_in_a_browser(folder: Path, only: str = "") -> list[str]:
    """A line for each error in the console, serious violation, flipbook that does not turn, and so on, of the pages in
    whose names `only` is."""
    from playwright.sync_api import sync_playwright

    found = []
    with served(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for path in pages_of(folder):
            name, begin = str(path.relative_to(folder)), time.monotonic()
            if name in ("genindex.html", "search.html") or only not in name:
                continue
            page: Any = browser.new_page()
            errors: list[str] = []
            page.on("console", lambda message, errors=errors: message.type == "error" and errors.append(message.text))
            page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())  # no network is needed
            page.goto(f"{address}/{name}", wait_until="load")
            faults = seen(page, name)
            faults += [
                f"{name}: the console says {error}" for error in errors if address in error or "http" not in error
            ]
            kilobytes = weight(path) / 1e3
            faults += [f"{name}: {kilobytes:.0f} kB, more than {AT_MOST}"] if kilobytes > AT_MOST else []
            page.close()
            print(*faults, sep="\n", end="\n" * bool(faults))
            print(f"{name}: {kilobytes:.0f} kB, {time.monotonic() - begin:.0f} s, {len(faults)} faults", flush=True)
            found += faults
        browser.close()
    return found


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="pages in whose names this is, and no live ones")
    args = parser.asked(argv)
    folder = args.folder.resolve()
    if not a_browser_is_there():
        print(
            "error: there is no Chromium, so no page was looked at; run `playwright install chromium`", file=sys.stderr
        )
        return 2
    faults = broken_links(folder) + seen_in_a_browser(folder, args.only)
    faults += [] if args.only else live_pages(folder)
    count = len(pages_of(folder))
    print(*faults, f"{count} pages, {len(faults)} faults", sep="\n")
    return 1 if faults or not count else 0


if __name__ == "__main__":
    installed.at_start(("playwright", "axe_playwright_python"), "requirements-site.txt")
    sys.exit(main(sys.argv[1:]))
