"""The site: its pages are those of the course in reading order, and its check sees what is broken. It is built, and
looked at in a browser, by `make site site-check`; here is what needs neither Sphinx nor a browser."""

import base64
import importlib.util
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from common import ROOT
from tools.site_check import Page, broken_links


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs/site/conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_contents_once(conf):
    listed = re.findall(r"^[\w/-]+\.(?:ipynb|md)$", conf.contents(), re.MULTILINE)
    notebooks = [page for page in listed if page.endswith(".ipynb")]
    there = [*ROOT.glob("*.ipynb"), *ROOT.glob("0*/*.ipynb")]
    assert sorted(notebooks) == sorted(str(path.relative_to(ROOT)) for path in there), "pages of the site"
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} < {*listed}
    assert len(listed) == len({*listed})


def test_the_first_page_is_a_map_of_the_trail(conf):
    """Every page that has minutes, once, with those that its own first cell promises."""
    promised = {}
    for path in ROOT.glob("0*/*.ipynb"):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        if found := re.search(r"\*\*Time:\*\* (\d+) minutes", first):
            promised[str(path.relative_to(ROOT).with_suffix(""))] = int(found[1])
    assert {page: minutes for _, _, page, minutes in conf.trail()} == promised
    drawn = Page(conf.landing().partition('class="map"')[2])
    assert drawn.links == [f"{page}.html" for _, _, page, _ in conf.trail()]
    shown = Page(conf.landing())
    assert not shown.faults and not re.search(r"@\w+@", conf.landing())


def test_anchors_and_links_to_folders(conf):
    """Two pages may have the same anchor, and each link leads to its own."""
    text = '<a id="compile"></a>\n\n## One\n[a](../tests) [b](../03_ddp) [c](switches.md#compile) [d](page.md#one)'
    found, other = (conf.as_myst(text, ROOT / "docs" / name) for name in ("switches.md", "cluster.md"))
    (own,), (elsewhere,) = (re.findall(r"^\((.+)\)=$", page, re.MULTILINE) for page in (found, other))
    assert own != elsewhere and f"[c](switches.md#{own})" in found and f"[c](switches.md#{own})" in other
    assert "[a](architecture.md)" in found and "[d](page.md#one)" in found
    assert "[b](../03_ddp/01_ddp.ipynb)" in found


def test_pictures_keep_their_text_and_become_files(conf, tmp_path):
    """Each is loaded when it comes into view; of a widget the picture is left, and of one with sliders the controls."""
    picture = io.BytesIO()
    Image.new("RGB", (86, 20)).save(picture, "png")
    encoded = base64.encodebytes(picture.getvalue()).decode()
    output = {
        "data": {"image/png": encoded, "text/plain": "sliders"},
        "metadata": {"image/png": {"alt": "two <ranks>", "width": 86}},
    }
    source = [
        json.dumps({"cells": [{"cell_type": "code", "id": "a", "outputs": [output]}], "metadata": {"widgets": {}}})
    ]
    conf.read_source(SimpleNamespace(outdir=tmp_path), "03_ddp/07_ten_questions", source)
    notebook = json.loads(source[0])
    shown = Page(notebook["cells"][0]["outputs"][0]["data"]["text/html"])
    (link,) = shown.links
    assert (tmp_path / "03_ddp" / link).resolve().read_bytes() == picture.getvalue() and not shown.faults
    text = notebook["cells"][0]["outputs"][0]["data"]["text/html"]
    assert 'alt="two &lt;ranks&gt;"' in text and "86 / 20" in text and 'loading="lazy"' in text
    assert notebook["metadata"] == {}


PAGE = '<html><body><a href="{link}">x</a><h2 id="there">There</h2><img src="a.png" alt="{alt}"></body></html>'


@pytest.mark.parametrize(
    "link, alt, broken",
    [
        ("#there", "a ring", ""),
        ("other.html#there", "a ring", ""),
        ("https://example.org/nowhere", "a ring", ""),
        ("gone.html", "a ring", "gone.html"),
        ("other.html#gone", "a ring", "other.html#gone"),
        ("#there", " ", "a.png"),
    ],
)
def test_what_is_broken_is_seen(tmp_path, link, alt, broken):
    Path(tmp_path, "a.png").touch()
    Path(tmp_path, "page.html").write_text(PAGE.format(link=link, alt=alt))
    Path(tmp_path, "other.html").write_text(PAGE.format(link="page.html", alt="a tree"))
    found = broken_links(tmp_path)
    assert len(found) == bool(broken) and all(fault.startswith("page.html: ") and broken in fault for fault in found)
