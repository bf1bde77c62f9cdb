"""The course as a site, from the committed pages, whose outputs are shown as they are: nothing is run.

sphinx-build -E -W -d .doctrees -c docs/site . _site
"""

import base64
import functools
import hashlib
import html
import json
import os
import re
import struct
import sys
import textwrap
import zlib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the modules of live pages
from common import symptoms  # noqa: E402
from common.questions import Question, questions  # noqa: E402
from tools import site_cells  # noqa: E402

CHAPTERS = {"01": "Ranks and messages", "02": "DataParallel", "03": "DDP", "04": "Models in pieces", "05": "Pipelines",
            "06": "Sharding (FSDP)"}  # fmt: skip
README = (ROOT / "README.md").read_text()

project = "Distributed training in PyTorch, from the inside"
author = "the authors of the course"
extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "planner/published/README.md",
    "*.ipynb",
    "0*/*.ipynb",
]
nb_execution_mode = "off"
nb_merge_streams = True  # what a cell prints is one box, however often it flushed
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False
html_math_renderer = "mathml"
nb_ipywidgets_js = {}  # what needs a kernel is shown as its picture
myst_heading_anchors = 4
html_theme = "sphinx_book_theme"
html_title = project
html_favicon = "icon.svg"
html_static_path = ["style.css", "live.js", "predict.js", "symptoms.js", "worker.js"]
html_css_files = ["style.css"]
html_js_files = ["live.js", "predict.js"]
LIVE = {
    "planner": "planner.page",
    "game": "course.pipeline.game_page",
}  # kind of live.js -> the module whose stored() is the page as it is first seen
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "use_fullscreen_button": False}
html_context = {"default_mode": "auto"}
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
# Pages link to files of the code, and to sections of them by line; highlighting of shell prompts may fail.
suppress_warnings = ["misc.highlighting_failure"]


def pages(pattern: str) -> list[str]:
    """The pages that README links to, in its order, each once."""
    found = re.findall(rf"\]\(({pattern})\)", README)
    return list(dict.fromkeys(found))


def contents() -> str:
    """What stands in the navigation: the trail by chapters, so that the next page is the trail's next page; then the
    pages that answer, the library, and the pages of docs/."""
    notebooks = pages(r"0[^)]*\.ipynb")
    outline = README[README.index('<a id="trail">') :]
    notebooks.sort(key=outline.find)
    on_trail = [f"{page}.ipynb" for _, _, page, _ in trail()]
    blocks = [("To begin with", ["distributed_training.ipynb"])]
    blocks += [(f"{number} {title}", [page for page in on_trail if page.startswith(number)])
               for number, title in CHAPTERS.items()]  # fmt: skip
    tried = ["docs/plan.md", "docs/game.md"]
    blocks.append(("Planner and game", tried))
    blocks.append(("The library", [page for page in notebooks if page not in on_trail]))
    documents = sorted({f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - {*tried})
    blocks.append(("Documents", [*documents, "planner/published/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]))
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```"
        for caption, names in blocks
    )


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a page sets by itself, beside those of its headings."""
    return frozenset(re.findall(r'<a id=\\?"([^"\\]+)\\?"></a>', page.read_text()) if page.is_file() else ())


def label(page: Path, anchor: str) -> str:
    """MyST's label of an anchor. Labels are one name space for all pages, so they have the page's name in them."""
    return re.sub(r"[^\w]+", "-", f"{page.relative_to(ROOT).with_suffix('')}-{anchor}").replace("_", "-").lower()


def as_myst(text: str, page: Path) -> str:
    """Anchors as MyST has them; links to folders lead to a chapter's first page, or to the page that describes them."""
    home = page.parent
    text = re.sub(r'^<a id="([^"]+)"></a>[ \t]*$', lambda mark: f"({label(page, mark[1])})=", text, flags=re.MULTILINE)

    def place_of(link):
        target = (home / link[1]).resolve() if link[1] else page
        return f"]({link[1]}#{label(target, link[2])})" if link[2] in anchors(target) else link[0]

    def first_page(link):
        folder = (home / link[1]).resolve()
        if not folder.is_dir() or not folder.is_relative_to(ROOT):
            return link[0]
        first = next(iter(sorted(folder.glob("0*.ipynb"))), ROOT / "docs" / "architecture.md")
        return f"]({os.path.relpath(first, home)})"

    text = to_code(text, page)
    return re.sub(r"\]\(([\w./-]+)\)", first_page, re.sub(r"\]\(([\w./-]*)#([\w.-]+)\)", place_of, text))


CODE = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([\w./-]+\.(py|yaml|toml|sh|sbatch|csv|json))\)")  # a link to a file


def code_of(link: re.Match, page: Path) -> Path | None:
    """The course's file that a link leads to."""
    target = (page.parent / link[2]).resolve()
    return target.relative_to(ROOT) if target.is_file() and target.is_relative_to(ROOT) else None


def to_code(text: str, page: Path) -> str:
    """Links to files of the code lead to pages that show them; left to Sphinx, they would download them."""

    def shown(link):
        if (file := code_of(link, page)) is None:
            return link[0]
        return f'<a href="{os.path.relpath(ROOT / "_code" / file, page.parent)}.html">{link[1]}</a>'

    return CODE.sub(shown, text)


def code_pages(app):
    """A page for each file that some page links to."""
    pages = [page_of(docname) for docname in sorted(app.env.found_docs)]
    links = [(link, page) for page in pages for link in CODE.finditer(page.read_text())]
    for file in sorted({str(file) for link, page in links if (file := code_of(link, page))}):
        kind = {"py": "python", "sbatch": "bash", "sh": "bash", "csv": "text"}.get(file.rpartition(".")[2])
        text = app.builder.highlighter.highlight_block(
            (ROOT / file).read_text(), kind or file.rpartition(".")[2], False
        )
        yield f"_code/{file}", {"title": file, "body": f"<section><h1>{file}</h1>{text}</section>"}, "page.html"


def page_of(docname: str) -> Path:
    return next(path for end in ("md", "ipynb") if (path := ROOT / f"{docname}.{end}").exists())


def live(text: str) -> str:
    """What stands between the marks of a live page is for readers without the site; here comes its stored answer."""

    def place(mark):
        stored = import_module(LIVE[mark[1]]).stored()
        state = "" if 'class="state"' in stored else '<p class="state" role="status"></p>'  # or where it is seen
        return f'<div class="live" data-live="{mark[1]}">{state}{stored}</div>'

    return re.sub(r"<!-- live: (\w+) -->.*?<!-- end live -->", place, text, flags=re.DOTALL)


def markup(text: str) -> str:
    """Text of a question as HTML: `code` is marked."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


# What a page's own text says where it asks for a guess. The site's question is the sheet on which one is locked in.
GUESS = re.compile(r"\*\*(write|predict|decide|sketch|choose|before)|before you (look|read)|write down", re.IGNORECASE)


def asked(question: Question, guessed: bool) -> str:
    """A question as HTML. It is hidden where no script runs, and so hides nothing itself. guessed: whether the text
    above it has asked already."""
    answers = html.escape(json.dumps([text for text in question.found if len(text) > 3]))
    first = "Lock in your guess on this" if guessed else "Before you look"
    if question.choices is None:
        low, high = question.interval
        judged = f'data-low="{low:.9g}" data-high="{high:.9g}"'
        field = '<input type="text" name="given" inputmode="decimal" autocomplete="off">'
        fields = f"<label>Your number {field} {html.escape(question.unit)}</label>"
    else:
        judged = f'data-right="{html.escape(question.filled(question.right))}"'
        fields = "".join(
            f'<label><input type="radio" name="given" value="{html.escape(choice)}"> {markup(choice)}</label>'
            for choice in map(question.filled, question.choices)
        )
    return (
        f'<form class="predict" id="predict-{question.number}" data-predict="{question.name}" {judged} '
        f'data-answers="{answers}" hidden><fieldset><legend>{first}: {markup(question.ask)}</legend>'
        f"{fields}</fieldset><button>Lock it in</button> "
        '<button type="button" class="skip">Show it without</button><p class="verdict" role="status" tabindex="-1"></p>'
        f"<template><span>{markup(question.filled(question.because))}</span></template></form>"
    )


SCORE = (
    '<div class="predict-score" hidden><p>On this page you have predicted <b class="here"></b> rightly, and of those '
    'that you have answered in the whole course <b class="course"></b>. The browser keeps your answers, and sends them '
    'nowhere.</p><button type="button" class="export">Save them as a file</button> <button type="button" '
    'class="forget">Forget them</button></div>'
)


def with_questions(cells: list[dict], page: str) -> list[dict]:
    """A page's cells with each question before the cell that answers it, and the score at the end."""
    own = questions().get(page, [])
    found = []
    for number, cell in enumerate(cells):
        above = "".join(cells[number - 1]["source"]) if number and cells[number - 1]["cell_type"] == "markdown" else ""
        guessed = bool(GUESS.search(above))
        found += [as_cell(asked(one, guessed)) for one in own if one.cell == cell["id"]]
        found.append(cell)
    return [*found, as_cell(SCORE)] if own else found


def as_cell(text: str) -> dict:
    return {"cell_type": "markdown", "id": f"site-{zlib.crc32(text.encode()):08x}", "metadata": {}, "source": text}


def in_files(text: str, target: Path, docname: str) -> str:
    """HTML whose PNGs are files of the site, which a browser loads when they come into view, and not a part of it."""

    def file_of(mark):
        picture = base64.b64decode(mark[1])
        name = f"{hashlib.sha256(picture).hexdigest()[:16]}.png"
        (target / "_images").mkdir(parents=True, exist_ok=True)
        (target / "_images" / name).write_bytes(picture)
        width, height = struct.unpack(">II", picture[16:24])
        size = f'style="aspect-ratio: {width} / {height}; height: auto; max-width: 100%; background-color: white"'
        return f'loading="lazy" {size} src="{"../" * docname.count("/")}_images/{name}"'

    text = re.sub(r' style="max-width: 100%; background-color: white"(?=>)', "", text)  # a flipbook's, said anew
    text = text.replace('<div class="flipbook-frames"', '<div class="flipbook-frames" tabindex="0"')  # moved by arrows
    return re.sub(r'src="data:image/png;base64,([^"]+)"', file_of, text)


def with_sliders(picture: str, docname: str, cell: str) -> str:
    """The stored picture of sliders, with their controls above it, and the place where the live one comes."""
    name = site_cells.name_of(docname, cell)
    return (f'<div class="live" data-live="sliders" data-cell="{name}"><p class="state" role="status"></p>'
            f'{site_cells.forms()[name]}<div class="answer">{picture}</div></div>')  # fmt: skip


def read_source(app, docname, source):
    """Pictures keep their alternative text, and what needs a kernel goes; README gets the table of contents."""
    page = page_of(docname)
    if docname == "README":
        source[0] += contents()
    if not source[0].lstrip().startswith("{"):
        source[0] = live(as_myst(source[0], page))
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = as_myst("".join(cell["source"]), page)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            moves = data.pop("application/vnd.jupyter.widget-view+json", None)
            about = output.get("metadata", {}).get("image/png", {})
            if "image/png" in data and "text/html" not in data:
                encoded = "".join(data.pop("image/png")).replace("\n", "")
                width = f' width="{about["width"]}"' if "width" in about else ""
                alt = html.escape(about.get("alt", ""))
                data["text/html"] = f'<img src="data:image/png;base64,{encoded}" alt="{alt}"{width}>'
            if "data:image/png;base64," in "".join(data.get("text/html", "")):
                shown = in_files("".join(data["text/html"]), Path(app.outdir), docname)
                data["text/html"] = with_sliders(shown, docname, cell["id"]) if moves else shown
    notebook["cells"] = with_questions(notebook["cells"], docname)
    notebook.get("metadata", {}).pop("widgets", None)
    source[0] = json.dumps(notebook)


def trail() -> list[tuple[str, str, str, int]]:
    """(chapter, title, page, minutes) of README's trail, in reading order."""
    rows = re.findall(r"^\| (\d\d) \| \[(.+?)\]\((.+?)\.ipynb\) \|.*\| (\d+) \|$", README, re.MULTILINE)
    return [(chapter, title.replace("`", ""), page, int(minutes)) for chapter, title, page, minutes in rows]


def landing() -> str:
    """The site's first page: what it is, ways in, and the trail as a map, of what README and the first page say."""
    stops = trail()
    first = json.loads((ROOT / f"{stops[0][2]}.ipynb").read_text())["cells"]  # which trains two processes by hand
    code = re.search(r"(def averaged\(.*?)\n\n", "\n".join("".join(cell["source"]) for cell in first), re.DOTALL)
    chapters = {chapter: [] for chapter, *_ in stops}
    for chapter, title, page, minutes in stops:
        text = f"{html.escape(title)} <span>{minutes}&nbsp;min</span>"
        chapters[chapter].append(f'<li style="--minutes: {minutes}"><a href="{page}.html">{text}</a></li>')
    spent = {name: sum(minutes for chapter, _, _, minutes in stops if chapter == name) for name in chapters}
    drawn = [f"<li><b>{name} {CHAPTERS[name]}</b>, {spent[name] / 60:.1f} hours<ol>{''.join(pages)}</ol></li>"
             for name, pages in chapters.items()]  # fmt: skip
    about = " ".join(README.split("\n\n")[1].split())  # README's first paragraph
    filled = {
        "about": html.escape(about),
        "title": html.escape(project), "code": html.escape(textwrap.dedent(code[1]).rstrip()),
        "first": f"{stops[0][2]}.html", "hours": f"{sum(spent.values()) / 60:.0f}", "map": "".join(drawn),
    }  # fmt: skip
    return re.sub(r"@(\w+)@", lambda mark: filled[mark[1]], (ROOT / "docs/site/landing.html").read_text())


# Synchronous scripts after it: what they find is there before the page is first seen, so nothing moves afterwards.
SYMPTOMS = (
    f'<section class="symptoms" data-nothing="{html.escape(symptoms.NOTHING.capitalize())}."'
    f' data-nearest="{html.escape(symptoms.NEAREST.capitalize())}" hidden>'
    '<h2>Places that explain a symptom</h2><div class="found"></div>'
    f'<p>No symptom, but a question? <a href="{trail()[0][2]}.html">How to train on two GPUs</a>; '
    '<a href="docs/plan.html">which layout fits more of them</a>; '
    '<a href="docs/glossary.html">what a word means</a>.</p><h2>Pages that have all of these words</h2>'
    "</section>"
    '<script src="_static/symptom_table.js"></script><script src="_static/symptoms.js"></script>'
)


CHAPTER = re.compile(
    r'<p aria-level="2" class="caption" role="heading">(.*?)</p>\n(<ul class="(current )?nav bd-sidenav">.*?\n</ul>)',
    re.DOTALL,
)


def folded(text: str) -> str:
    """A page whose navigation shows the links of the page's own chapter, and of the others the names: there are sixty,
    and who reads with the keyboard goes through what is shown. The course's name leads to the site's first page."""
    text = re.sub(r'(<a class="navbar-brand logo" href="[./]*)(?:README.html|#)"', r'\1index.html"', text)
    return CHAPTER.sub(
        lambda mark: f"<details{' open' * bool(mark[3])}><summary>{mark[1]}</summary>{mark[2]}</details>", text
    )


def write_index(app, error):
    """The first page; and on the page of the search, what the doctor would answer above what has the words."""
    if error is None:
        for path in Path(app.outdir).rglob("*.html"):
            if "bd-docs-nav" in (text := path.read_text()):
                path.write_text(folded(text))
        Path(app.outdir, "index.html").write_text(landing())
        page = Path(app.outdir, "search.html")
        text = page.read_text()
        if text.count('<div id="search-results"') != 1:
            raise ValueError("search.html has no place for symptoms: the theme has changed")
        page.write_text(text.replace('<div id="search-results"', f'{SYMPTOMS}<div id="search-results"'))


def formula(self, node):
    """As MathML, which a browser draws by itself: nothing is fetched. Raises docutils' MathError for unknown TeX."""
    from docutils.nodes import SkipNode  # comes with Sphinx, which the tests of this file do without
    from docutils.utils.math.latex2mathml import tex2mathml

    tex = node.astext().replace(r"\dots", r"\ldots")
    self.body.append(tex2mathml(tex, as_block=node.tagname == "math_block"))
    raise SkipNode


def setup(app):
    from sphinx.search.en import SearchEnglish

    # What sentences of readers have and a page's answer needn't: every other word has to be on a page that is found.
    SearchEnglish.stopwords |= {"an", "any", "can", "do", "does", "from", "has", "have", "how", "i", "its", "my", "s",
                                "so", "t", "we", "what", "when", "which", "why", "you"}  # fmt: skip
    app.add_html_math_renderer("mathml", inline_renderers=(formula, None), block_renderers=(formula, None))
    app.connect("source-read", read_source)
    app.connect("html-collect-pages", code_pages)
    app.connect("build-finished", write_index)
