"""The site's pages in a notebook: the schedule game and the planner beside what you are reading, with the same rules.

    from common.lab.site import show
    show("docs/game")

`make site` has to have built the site once. It is served by this process to this machine alone.
"""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

from common import ROOT
from common.errors import UserError


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments):
        pass


def server_of(folder: Path) -> http.server.ThreadingHTTPServer:
    """A server of a folder's files on a free port of this machine, which has begun to answer."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder's files, as long as the block runs."""
    server = server_of(folder)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@functools.cache
def address(folder: Path) -> str:
    """The address of a folder's files, for as long as this process lives."""
    return f"http://127.0.0.1:{server_of(folder).server_port}"


def show(page: str, site: Path = ROOT / "_site", height: int = 720):
    """A page of the site, as "docs/game" or "docs/plan", in a frame below the cell. Raises UserError where the site is
    not built, or has no such page."""
    from IPython.display import IFrame

    if not (site / f"{page}.html").is_file():
        built = (
            f"it has {', '.join(sorted(one.stem for one in (site / 'docs').glob('*.html')))}" if site.exists() else ""
        )
        raise UserError(f"no page {page}.html in {site.name}: {built or 'run `make site` once'}")
    return IFrame(f"{address(site)}/{page}.html", "100%", height)
