"""Pictures to step through: a slider and two buttons in plain HTML, which needs no kernel and no network.

A notebook that was run here, nbconvert's HTML and a built site show one frame at a time. Where scripts are taken out,
as JupyterLab does in a notebook that somebody else has run, the frames stand in a row that can be scrolled. Viewers
without HTML show the PNG of one frame.
"""

import base64
import html
from dataclasses import dataclass

from matplotlib.figure import Figure

from common.lab.plotting import png


@dataclass(frozen=True)
class Frame:
    """One picture, a Matplotlib figure or the bytes of a PNG or an SVG; what it shows in words; a line above it."""

    picture: Figure | bytes
    alt: str
    caption: str


# Each script of a page sets up every flipbook that is not yet set up, so it need not know which one is its own.
SCRIPT = """
for (const book of document.querySelectorAll(".flipbook:not([data-ready])")) {
  book.dataset.ready = "";
  const frames = [...book.querySelectorAll(".flipbook-frame")];
  const [back, next] = book.querySelectorAll("button");
  const slider = book.querySelector("input");
  const show = (number) => {
    slider.value = Math.min(Math.max(number, 1), frames.length);
    frames.forEach((frame, index) => { frame.hidden = index + 1 != slider.value; });
    slider.setAttribute("aria-valuetext", `${slider.value} of ${frames.length}`);
    back.disabled = slider.value == 1;
    next.disabled = slider.value == frames.length;
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  back.addEventListener("click", () => show(Number(slider.value) - 1));
  next.addEventListener("click", () => show(Number(slider.value) + 1));
  book.querySelector(".flipbook-controls").style.display = "flex";
  book.querySelector(".flipbook-frames").style.display = "block";
  show(1);
}
"""


def flipbook(frames: list[Frame], still: int = -1) -> None:
    """Show `frames` under a notebook cell, the first one first, and close their figures.

    still: the frame that viewers without HTML show; a figure or a PNG

    Raises ValueError for fewer than two frames, a frame without words, and a still that is an SVG.
    """
    from IPython.display import display  # scripts draw too, and need no IPython

    if len(frames) < 2 or not all(frame.alt.strip() and frame.caption.strip() for frame in frames):
        raise ValueError("a flipbook has two frames or more, each with alt text and a caption")
    pictures = [_bytes(frame.picture) for frame in frames]
    if not _is_png(pictures[still]):
        raise ValueError("the still must be a figure or a PNG")
    data = {
        "text/html": _page(frames, pictures),
        "image/png": base64.b64encode(pictures[still]).decode(),
        "text/plain": f"<flipbook of {len(frames)} frames>",
    }
    display(data, metadata={"image/png": {"alt": frames[still].alt}}, raw=True)


def _bytes(picture: Figure | bytes) -> bytes:
    if isinstance(picture, bytes):
        return picture
    return png(picture, dpi=100)


def _is_png(picture: bytes) -> bool:
    return picture.startswith(b"\x89PNG")


def _page(frames: list[Frame], pictures: list[bytes]) -> str:
    count, shown = len(frames), ""
    for number, (frame, picture) in enumerate(zip(frames, pictures, strict=True), start=1):
        kind = "png" if _is_png(picture) else "svg+xml"
        source = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
        # The ground is white in a dark theme too: labels are black.
        shown += f"""<div class="flipbook-frame" style="flex: none; max-width: 100%">
<p style="margin: 4px 0"><b>{number} of {count}.</b> {html.escape(frame.caption)}</p>
<img src="{source}" alt="{html.escape(frame.alt)}" style="max-width: 100%; background-color: white">
</div>
"""
    # Hidden until the script runs: without it they would do nothing. And JupyterLab would take their keys for its own
    # shortcuts: the arrows move between cells.
    keys = 'data-lm-suppress-shortcuts="true"'
    controls = f"""<div class="flipbook-controls" style="display: none; align-items: center; max-width: 480px">
<button type="button" {keys} aria-label="previous frame">&#9664;</button>
<input type="range" min="1" max="{count}" value="1" {keys} aria-label="frame" style="flex: 1">
<button type="button" {keys} aria-label="next frame">&#9654;</button>
</div>
"""
    return f"""<div class="flipbook" role="group" aria-label="flipbook of {count} frames">
{controls}<div class="flipbook-frames" style="display: flex; gap: 24px; overflow-x: auto">
{shown}</div>
</div>
<script>{SCRIPT}</script>"""
