"""What people have asked in public is answered on a page, which links the threads, and is found by its words."""

import pytest

from common import symptoms

ASKED = symptoms.asked()


def test_each_question_is_listed_once_and_a_thread_of_github_is_called_by_its_repository_and_number():
    assert len({one.asked for one in ASKED}) == len(ASKED)
    for kind in ("issues", "pull"):
        assert symptoms.thread_name(f"https://github.com/some/repository/{kind}/17#comment") == "repository#17"


@pytest.mark.parametrize("one", ASKED, ids=[one.asked for one in ASKED])
def test_the_section_that_answers_links_every_thread(one):
    section = symptoms.section_of(one.page, one.anchor)
    assert one.heading and not [address for address in one.threads if address not in section]


@pytest.mark.parametrize("one", ASKED, ids=[one.asked for one in ASKED])
def test_the_question_and_each_thread_lead_to_the_section(one):
    for words in (one.asked, *one.called, *map(symptoms.thread_name, one.threads)):
        assert (one.page, symptoms.plain(one.heading)) in [
            tuple(place.where.split(", ", 1)) for place in symptoms.find(words)
        ], words
