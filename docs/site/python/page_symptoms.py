"""The search for a symptom, in the browser: what `python -m common.doctor --symptom` answers, with links.

The site brings the places as symptoms.json (tools/site_runtime.py), because the pages themselves are not there.
"""

import functools
import json
from html import escape
from pathlib import Path

from common import symptoms

MOST = 6


@functools.cache
def known() -> tuple[symptoms.Finder, dict[symptoms.Place, str]]:
    """What finds places, and the address of each."""
    rows = json.loads(Path(__file__).with_name("symptoms.json").read_text())
    addresses = {symptoms.Place(*fields): address for *fields, address in rows}
    return symptoms.Finder(list(addresses)), addresses


def reply(text: str) -> str:
    """text: JSON of {"q": words}."""
    words = json.loads(text).get("q", "")
    finder, addresses = known()
    found = finder.find(words, MOST)
    items = "".join(
        f'<li><a href="{escape(addresses[one])}">{escape(one.what[:160])}</a><br>{escape(one.where)}</li>'
        for one in found
    )
    html = f"<ol>{items}</ol>" if found else f"<p>{escape(symptoms.NOTHING)}</p>"
    return json.dumps({"html": html, "answer": [[one.where, one.what] for one in found], "state": {"q": words}})
