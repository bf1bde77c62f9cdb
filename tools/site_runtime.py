"""What makes the site's pages live: Python for the browser, and the course's own modules for it.

    python -m tools.site_runtime _site

Pyodide comes from npm, in one pinned version whose checksum is compared, and is kept in build/. Beside it goes one zip
with the files of ours that LIVE imports, found by importing them without any package, and the tables that they read.
"""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from common import ROOT

VERSION = "314.0.7"
SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
LIVE = ("planner.page", "course.pipeline.game_page")  # the modules whose reply(text) pages call
DATA = ("common/*.csv", "planner/*.csv", "planner/constants.json", "planner/published/*.csv", "05_pipeline/levels.json")
FIND = """
import sys
for name in {live!r}: __import__(name)
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


def sources() -> list[Path]:
    """The files of ours that the live modules import, by a Python that has the standard library alone."""
    program = FIND.format(live=LIVE)
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in done.stdout.splitlines()]
    # a chapter is found through its folder, whose name differs from that of its module
    return sorted(path.relative_to(ROOT) for path in map(Path.resolve, paths) if path.is_relative_to(ROOT))


def zipped(target: Path) -> int:
    """Write the zip; the same bytes whenever the files are the same. Returns its size."""
    data = [path.relative_to(ROOT) for pattern in DATA for path in sorted(ROOT.glob(pattern))]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in [*sources(), *data]:
            entry = zipfile.ZipInfo(str(path), date_time=(1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, (ROOT / path).read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return target.stat().st_size


def main(argv: list[str]) -> None:
    static = Path(argv[0], "_static")
    runtime = static / "pyodide"
    runtime.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fetched(ROOT / "build")) as archive:
        for name in FILES:
            content = archive.extractfile(f"package/{name}")
            assert content is not None  # the checksum says that it is there
            (runtime / name).write_bytes(content.read())
    weight = sum(path.stat().st_size for path in runtime.iterdir())
    size = zipped(static / "course.zip")
    print(f"live pages: Pyodide {VERSION}, {weight / 1e6:.1f} MB; the course's modules and tables, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
