"""Flipbooks hold every frame with its words, need nothing from elsewhere, and are the same at every run."""

import base64
import re
from html.parser import HTMLParser

import IPython.display
import matplotlib.pyplot as plt
import pytest

from common.lab.flipbook import Frame, flipbook

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><circle r="4"/></svg>'


def figure(height=2):
    return plt.subplots(figsize=(3, height))[0]


def frames():
    return [
        Frame(figure(1), "nothing has been sent", "Start"),
        Frame(figure(2), 'rank 0 sends "1" & waits', "Step 1 < 2"),
        Frame(SVG, "a circle in the end", "End"),
    ]


@pytest.fixture
def shown(monkeypatch):
    """What is displayed: data and metadata of each output."""
    found = []
    monkeypatch.setattr(
        IPython.display, "display", lambda data, metadata, raw: found.append((data, metadata)) if raw else None
    )
    yield found
    plt.close("all")


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data.strip())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def test_every_frame_is_there_with_its_words(shown):
    open_before = plt.get_fignums()  # those of other tests of this worker
    flipbook(frames(), still=1)
    data, metadata = shown[0]
    page = Page(data["text/html"])
    assert [image["alt"] for image in page.all("img")] == [
        "nothing has been sent",
        'rank 0 sends "1" & waits',
        "a circle in the end",
    ]
    numbers = [re.findall(r"\d+", text) for text in page.text]
    assert [pair[0] for pair in numbers if pair[1:] == ["3"]] == ["1", "2", "3"], "numbers of the frames, of three"
    assert [text for text in page.text if text in ("Start", "Step 1 < 2", "End")] == ["Start", "Step 1 < 2", "End"]
    pictures = [base64.b64decode(image["src"].partition("base64,")[2]) for image in page.all("img")]
    assert [picture[:4] for picture in pictures] == [b"\x89PNG", b"\x89PNG", b"<svg"]
    kinds = [image["src"].partition(";")[0] for image in page.all("img")]
    assert kinds == ["data:image/png", "data:image/png", "data:image/svg+xml"], "what browsers are told a picture is"
    assert len({*pictures}) == 3 and base64.b64decode(data["image/png"]) == pictures[1]
    assert metadata == {"image/png": {"alt": 'rank 0 sends "1" & waits'}}, "the words of the still"
    assert plt.get_fignums() == open_before, "figures that flipbook has not closed"


def test_viewers_without_html_show_the_last_frame(shown):
    flipbook(frames()[:2])
    data, metadata = shown[0]
    last = Page(data["text/html"]).all("img")[-1]
    assert last["src"].endswith(data["image/png"]) and metadata["image/png"]["alt"] == last["alt"]


def test_it_needs_no_network(shown):
    flipbook(frames(), still=0)
    html = re.sub(r"base64,[^\"]*", "", shown[0][0]["text/html"])
    assert not re.search(r"https?:|//[\w.]|@import|url\(", html)
    assert {tag for tag, attributes in Page(html).tags if {"src", "href"} & attributes.keys()} == {"img"}


def test_it_is_the_same_at_every_run(shown):
    flipbook(frames(), still=0)
    flipbook(frames(), still=0)
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: flipbook(frames()[:1]), "two frames"),
        (lambda: flipbook([*frames(), Frame(SVG, " ", "Without words")], still=0), "alt text"),
        (lambda: flipbook([*frames(), Frame(SVG, "Without a caption", "")], still=0), "caption"),
        (lambda: flipbook(frames(), still=2), "still"),
    ],
)
def test_what_cannot_be_shown_is_refused(wrong, message, shown):
    with pytest.raises(ValueError, match=message):
        wrong()
    assert not shown
