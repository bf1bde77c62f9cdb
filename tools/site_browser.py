"""What those who look at the built site share: its pages, a browser, and what keeps somebody from reading a page."""

import shutil
from pathlib import Path
from typing import Any


def pages_of(folder: Path) -> list[Path]:
    """All pages of the site; the theme keeps templates among its static files."""
    return [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]


def chromium() -> str | None:
    """The system's; None: the one that `playwright install chromium` fetches."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def a_browser_is_there() -> bool:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return bool(chromium()) or Path(playwright.chromium.executable_path).exists()


def violations(page: Any) -> list[dict]:
    """What axe-core finds that keeps somebody from reading or using the page."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"], "preload": False}).response["violations"]
    return [one for one in found if one["impact"] in ("serious", "critical")]
