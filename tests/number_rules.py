"""A number in a notebook's prose is one that the page computes, or one that somebody is cited for.

tests/pages/test_notebooks.py applies the rule.
"""

import itertools
import re

from notebook_rules import code, markdown, name, output_texts

from tools.facts import read

NUMBER = re.compile(r"(?<![\w.,^_/#:-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w^]|[.,]\d|:\d)")
# "section 3.1", "torch 2.13", "chapters 03 and 04": places and versions, not quantities.
PLACE = re.compile(
    r"\b(?:sections?|tables?|figures?|chapters?|notebooks?|exercises?|versions?|torch|PyTorch|CUDA|NCCL|Python)"
    r"(?: [\d., ]+(?:and|to|or))?\W*$",
    re.IGNORECASE,
)
CITED = re.compile(r"https?:|\b(?:19|20)\d\d\b|\[\d+\](?!\()")  # by a link, as "(Kaplan et al. 2020)", or as "[2]"


def numbers_of_the_prose_are_computed_or_cited(notebook, path):
    """A number of two digits or more is printed by the page, rounded at most, or in the code of its section, or cited.

    Where the sentence links to another notebook, that one's numbers count as well.
    """
    where = sections(notebook)
    for cell, word, percent, sentence in numbers_of_the_prose(notebook):
        near = [other.source for other in code(notebook) if where[other.id] & where[cell.id]]
        known = numbers_in([*near, *outputs(notebook)])
        for other in re.findall(r"\]\(([^)#:]+\.ipynb)", sentence):
            if (path.parent / other).exists():
                there = read(path.parent / other)
                known |= numbers_in([*(cell.source for cell in code(there)), *outputs(there)])
        if not is_among(known, word, percent):
            yield f"{name(cell)} says {word}, which no cell prints, and which is not cited: {sentence[:150]}"


def outputs(notebook):
    return [text for cell in code(notebook) for text in output_texts(cell)]


def sections(notebook):
    """The numbers of the sections in which each cell is: one of Markdown may end some and begin another."""
    number, found = 0, {}
    for cell in notebook.cells:
        begun = len(re.findall(r"^## ", cell.source, re.MULTILINE)) if cell.cell_type == "markdown" else 0
        found[cell.id] = {*range(number + cell.source.startswith("## ") * (begun > 0), number + begun + 1)}
        number += begun
    return found


def numbers_in(texts):
    found = re.findall(r"\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?", "\n".join(texts))
    return {float(number.replace(",", "").replace("_", "")) for number in found}


def numbers_of_the_prose(notebook):
    heading = ""
    for cell in markdown(notebook):
        text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$|<[^>]*>", " ", cell.source, flags=re.DOTALL)
        text = re.sub(r"^\*\*Time:\*\* \d+", "", text, flags=re.MULTILINE)
        for paragraph in re.split(r"\n\s*\n|\n(?=\* |\d+\. |\||#)", text):
            heading = paragraph if paragraph.startswith("#") else heading
            if paragraph == heading or re.search("Exercises|References", heading.partition("\n")[0]):
                continue
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z*(\[])", paragraph):
                if CITED.search(sentence):
                    continue
                bare = re.sub(r"\]\([^)]*\)", " ", sentence)
                for number in NUMBER.finditer(bare):
                    percent = bool(re.match(r"\s*(?:%|percent)", bare[number.end() :]))
                    digits = len(re.sub(r"\D", "", number[0]).strip("0"))
                    if not PLACE.search(bare[: number.start()]) and (digits > 1 or re.search(r"[.,]", number[0])):
                        yield cell, number[0], percent, " ".join(sentence.split())


def is_among(known, word, percent):
    """Whether some number is `word` when rounded to as many digits, perhaps in thousands, millions or as a share."""
    value, decimals = float(word.replace(",", "")), len(word.partition(".")[2])
    for number, scale in itertools.product(known, (1, 100) if percent else (1, 1e-3, 1e3, 1e-6, 1e6, 1e-9, 1e9)):
        rounds = decimals or scale != 1 or number != int(number)  # a whole number is not rounded to another
        if abs(number * scale - value) <= (0.5 * 10**-decimals if rounds else 0) + 1e-9 * value:
            return True
    return False
