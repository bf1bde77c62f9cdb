"""What makes the site's pages live: Python for the browser, and the course's own modules for it.

    python -m tools.site_runtime _site

Pyodide comes from npm, in one pinned version whose checksum is compared, and is kept in build/. Beside it goes one zip
with the files of ours that LIVE imports, found by importing them without any package, and the tables that they read.
"""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from html import unescape
from itertools import chain
from pathlib import Path

from common import ROOT, symptoms
from common.errors import Parser
from tools import site_cells

VERSION = "314.0.7"
SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
LIVE = ("planner.page", "course.pipeline.game_page", "page_sliders")  # whose reply(text) pages call
DATA = ("common/*.csv", "planner/*.csv", "planner/constants.json", "planner/published/*.csv", "05_pipeline/levels.json")
FIND = """
for name in {live!r}: __import__(name)
for cell in sys.modules["page_sliders"].CELLS.glob("*.py"): sys.modules["page_sliders"].of(cell.stem)
print(*sorted(module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)), sep="\\n")
"""


def fetched(folder: Path) -> Path:
    """The package of Pyodide, downloaded once. Raises SystemExit where npm is missing, or the checksum is another."""
    package = folder / f"pyodide-{VERSION}.tgz"
    if not package.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"pyodide@{VERSION}", "--pack-destination", str(folder)]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(
                f"error: `{' '.join(command[:4])}` did not work ({error}); live pages need npm once, to get Pyodide"
            )
    found = hashlib.sha512(package.read_bytes()).hexdigest()
    if found != SHA512:
        sys.exit(f"error: {package} has another checksum than tools/site_runtime.py says; remove it, and look why")
    return package


def sources(laid_out: Path) -> list[Path]:
    """The files of ours that the live modules import, by a Python that has the standard library alone, and the folder
    in which site_cells has laid out what a browser needs besides."""
    paths = [Path(line) for line in site_cells.alone(FIND.format(live=LIVE), laid_out).splitlines()]
    # a chapter is found through its folder, whose name differs from that of its module
    return sorted(path.relative_to(ROOT) for path in map(Path.resolve, paths) if path.is_relative_to(ROOT))


def zipped(target: Path) -> int:
    """Write the zip; the same bytes whenever the files are the same. Returns its size."""
    data = [path.relative_to(ROOT) for pattern in DATA for path in sorted(ROOT.glob(pattern))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site_cells.laid_out(folder)
        files = {path: ROOT / path for path in [*sources(folder), *data]}
        files |= {path.relative_to(folder): path for path in sorted(folder.rglob("*.py"))}
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path, file in files.items():
                entry = zipfile.ZipInfo(str(path), date_time=(1980, 1, 1, 0, 0, 0))
                archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return target.stat().st_size


def symptom_table(site: Path) -> int:
    """Write what the search for symptoms adds up, and the places with title and address. Returns the size."""
    from docutils.nodes import make_id  # comes with Sphinx

    pages = {page: page.read_text() for page in site.rglob("*.html") if "_static" not in page.parts}
    ids = {page: set(re.findall(r'id="([^"]+)"', text)) for page, text in pages.items()}
    places = []
    for place in symptoms.all_places():
        target = site / Path(place.page).with_suffix(".html")
        names = map(make_id, (place.section, place.what.rpartition(" › ")[2]))
        anchor = next((one for one in names if one and one in ids[target]), "")
        address = str(target.relative_to(site)) + f"#{anchor}" * bool(anchor)
        found = re.search(r"<title>(.*?)(?: &#8212;.*?)?</title>", pages[target], re.DOTALL)
        title = unescape(found[1]) if found else place.page
        title += f": {place.section}" * (not place.what.endswith(place.section) and not place.section.isidentifier())
        places.append({"where": place.where, "what": place.what[:160], "why": place.why, "title": title,
                       "address": address})  # fmt: skip
    table = {
        "small": sorted(symptoms.SMALL),
        "endings": symptoms.ENDINGS,
        "doubled": symptoms.DOUBLED,
        "few": symptoms.TERSE,
        "also": symptoms.also(),
        "weights": {term: [*chain(*column)] for term, column in symptoms.weights().items()},
        "places": places,
    }
    target = site / "_static" / "symptom_table.js"
    target.write_text(f"window.SYMPTOMS = {json.dumps(table, separators=(',', ':'))};\n")
    return target.stat().st_size


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the site, as sphinx-build has made it")
    folder = parser.asked(argv).folder
    static = folder / "_static"
    runtime = static / "pyodide"
    runtime.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fetched(ROOT / "build")) as archive:
        for name in FILES:
            content = archive.extractfile(f"package/{name}")
            assert content is not None  # the checksum says that it is there
            (runtime / name).write_bytes(content.read())
    weight = sum(path.stat().st_size for path in runtime.iterdir())
    size, places = zipped(static / "course.zip"), symptom_table(folder)
    print(f"live pages: Pyodide {VERSION}, {weight / 1e6:.1f} MB; the course's modules, tables {size / 1e3:.0f} kB; "
          f"symptoms, {places / 1e3:.0f} kB")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
