"""Who knows only what went wrong finds the place that explains it."""

import json
from collections import Counter

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from common import ROOT, doctor, symptoms
from course.ddp import catalogue

MISTAKES = catalogue.mistakes().values()
MESSAGES = Counter(message for mistake in MISTAKES for _, message in mistake.messages)
OWN = [(mistake, message) for mistake in MISTAKES for _, message in mistake.messages if MESSAGES[message] == 1]


def places(words: str) -> str:
    return "\n".join(place.where for place in symptoms.find(words))


@pytest.mark.parametrize(
    "mistake, message", OWN, ids=[f"{mistake.name}-{number}" for number, (mistake, _) in enumerate(OWN)]
)
def test_a_message_of_one_mistake_leads_to_it(mistake, message):
    assert mistake.name in places(message)


@pytest.mark.parametrize(
    "words, where",
    [
        ("everything stops when I write a checkpoint", "Hangs and timeouts"),
        ("my loss becomes nan", "Wrong numbers"),
        ("my loss is NaN only on rank 1", "Wrong numbers"),
        ("two nodes are slower than a single one", "Slow training"),
        ("the address is already in use", "It does not start"),
        ("GPU 0 runs out of memory, the others do not", "one_gpu_for_all"),
        ("training was killed and the loss is higher after it resumed", "06_checkpoints_and_failures"),
        ("test accuracy depends on how many GPUs I use", "03_feeding"),
        ("find_unused_parameters", "09_ddp_in_practice"),
        ("each rank's gradient is a fourth of that of one process", "Wrong numbers"),
        ("with 8 GPUs the loss is an eighth of that on one", "Wrong numbers"),
        ("the logged loss is 32x smaller with gradient accumulation", "Wrong numbers"),
        ("out of memory in torch.save at the end, not while it trains", "Out of memory"),
        ("rank 0 tokenizes, and the others abort after ten minutes", "Hangs and timeouts"),
        ("a ResNet with two images per GPU loses accuracy", "05_training_well"),
        ("SIGBUS in the container as soon as num_workers > 0", "Out of memory"),
        ("with 1 node of 8 GPUs samples_per_second is 30 for each GPU, with 2 or 3 nodes it is 10", "02_fully_shard"),
    ],
)
def test_a_symptom_in_other_words_leads_to_its_place(words, where):
    assert where in places(words)


@pytest.mark.parametrize("page", sorted({place.page for place in symptoms.all_places()}))
def test_a_place_names_a_section_that_its_page_has(page):
    text = (ROOT / page).read_text()
    if page.endswith(".ipynb"):
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    headings = {symptoms.plain(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    named = {place.section for place in symptoms.all_places() if place.page == page}
    assert named and not [section for section in named - headings if f'"{section}"' not in text]  # a program's name


def test_terms_weigh_what_scikit_learn_makes_of_them():
    """Rarer and more frequent words more, in places of any length; rarity once more, for the question."""
    all_places = symptoms.all_places()
    counted = TfidfVectorizer(analyzer=symptoms.terms_of, sublinear_tf=True, norm=None)
    table = counted.fit_transform([place.text for place in all_places]).toarray()
    length = np.maximum(symptoms.SHORT, np.linalg.norm(table, axis=1, keepdims=True))
    expected = 1000 * table / length * counted.idf_ * np.array([[place.known] for place in all_places])
    found = np.zeros_like(expected)
    for term, weighed in symptoms.weights().items():
        for place, weight in weighed:
            found[place, counted.vocabulary_[term]] = weight
    assert np.abs(found - expected).max() < 0.501 and found.max() > 100


def test_a_guess_is_called_one():
    assert symptoms.answer("my cat walked over the keyboard").startswith(symptoms.NEAREST)
    assert symptoms.fits("EADDRINUSE") and symptoms.fits("it hangs at the first checkpoint")


def test_words_that_are_nowhere_are_answered_in_one_line(capsys):
    assert doctor.main(["--symptom", "qwzx"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
