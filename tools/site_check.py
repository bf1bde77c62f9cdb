"""The built site, page by page: links, pictures, and what a browser says of it.

    python -m tools.site_check _site

Links and pictures are checked in the HTML. Then Chromium opens every page: no error in its console, no serious
violation of accessibility (axe-core), and every flipbook can be turned by keyboard. Chromium is that of the system, or
the one that `playwright install chromium` fetches. Then come the pages that are live (tools/site_live.py). Exit code 0
if all is well, 1 with a line for each fault, 2 where there is no browser, and nothing was looked at.
"""

import contextlib
import functools
import http.server
import shutil
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse


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


def pages_of(folder: Path) -> list[Path]:
    """All pages of the site; the theme keeps templates among its static files."""
    return [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]


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


@contextlib.contextmanager
def served(folder: Path):
    """The address of the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def chromium() -> str | None:
    """The system's; None: the one that `playwright install chromium` fetches."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def a_browser_is_there() -> bool:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return bool(chromium()) or Path(playwright.chromium.executable_path).exists()


def seen_in_a_browser(folder: Path) -> list[str]:
    """A line for each error in the console, serious violation, and flipbook that does not turn."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    found = []
    with served(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for path in pages_of(folder):
            name = str(path.relative_to(folder))
            if name in ("genindex.html", "search.html"):
                continue
            page = browser.new_page()
            errors: list[str] = []
            page.on("console", lambda message, errors=errors: message.type == "error" and errors.append(message.text))
            page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())  # no network is needed
            page.goto(f"{address}/{name}", wait_until="load")
            found += [
                f"{name}: the console says {error}" for error in errors if address in error or "http" not in error
            ]
            shown = "images => images.filter(i => i.offsetParent && !i.naturalWidth).length"
            missing = page.eval_on_selector_all("img", shown)
            found += [f"{name}: {missing} pictures are not shown"] if missing else []
            for number, book in enumerate(page.query_selector_all(".flipbook"), start=1):
                slider = book.query_selector("input")
                before = slider.input_value()
                slider.focus()
                page.keyboard.press("ArrowRight")
                if not slider.is_visible() or slider.input_value() == before:
                    found.append(f"{name}: flipbook {number} does not turn")
                visible = len([f for f in book.query_selector_all(".flipbook-frame") if f.is_visible()])
                found += [f"{name}: flipbook {number} shows {visible} frames"] if visible != 1 else []
            for violation in Axe().run(page).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    where = violation["nodes"][0]["html"][:120]
                    found.append(f"{name}: {violation['id']}, {len(violation['nodes'])} times, first {where}")
            page.close()
        browser.close()
    return found


def main(argv: list[str]) -> int:
    from tools.site_live import live_pages

    folder = Path(argv[0]).resolve()
    if not a_browser_is_there():
        print(
            "error: there is no Chromium, so no page was looked at; run `playwright install chromium`", file=sys.stderr
        )
        return 2
    faults = broken_links(folder) + seen_in_a_browser(folder) + live_pages(folder)
    count = len(pages_of(folder))
    print(*faults, f"{count} pages, {len(faults)} faults", sep="\n")
    return 1 if faults or not count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
