"""Links between pages: whether each leads to a file, and to a place in it, on GitHub and in JupyterLab alike."""

import json
import re


def dead_links(text, folder):
    """Relative links of some Markdown in `folder` that lead to no file, or to no place in one."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]+)\"", text)
    for target in filter(None, (a or b for a, b in targets)):
        file, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        if file and not (folder / file).exists():
            yield f"the link {target} leads to no file"
        elif anchor and (not file or file.endswith((".md", ".ipynb"))):
            page = markdown_of(folder / file) if file else text
            if anchor not in anchors(page):
                wanted = [heading for heading in headings(page) if slug(heading) == slug(anchor)]
                hint = f': write <a id="{slug(anchor)}"></a> above {wanted[0]!r}, and link to that' if wanted else ""
                yield f"the link {target} leads to no heading{hint}"


def markdown_of(path):
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def headings(page):
    """The text of each heading, without its marks."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return [re.sub(r"<.*?>|[`*]", "", heading) for heading in re.findall(r"^#+ +(.*?) *$", page, re.MULTILINE)]


def anchors(page):
    """The places that a link can name: ids that the page gives, and headings for which both programs have one name.

    GitHub makes a heading's letters small and drops its punctuation; JupyterLab keeps both.
    """
    ids = set(re.findall(r'<a id="([^"]+)"></a>', page))
    return ids | {slug(heading) for heading in headings(page) if slug(heading) == heading.replace(" ", "-")}


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
