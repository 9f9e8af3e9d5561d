"""The documentation as a whole: links lead somewhere, pages are in the site, the README is short."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GUIDE = sorted(DOCS.glob("guide/*.md"))
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def prose_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors_of(page: Path) -> list[str]:
    """What GitHub and the site call its headings."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def broken_links(page: Path) -> list[str]:
    broken = []
    for target, anchor in LINK.findall(prose_of(page)):
        file = (page.parent / target).resolve() if target else page
        # Of equal headings only the first has a name that GitHub and the site agree on.
        if not file.exists() or (anchor and anchors_of(file).count(anchor) != 1):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n## B, c\n\n[a](#a) [b](page.md#b-c) [web](https://nowhere) `[code](none.md)`\n"
        "[no file](none.md) [no anchor](page.md#b) ![no picture](none.png)\n"
        "```text\n# d\n[code](none.md)\n```\n[in code](#d)\n"
    )
    assert broken_links(page) == ["none.md", "page.md#b", "none.png", "#d"]


def test_the_readme_is_one_screen() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) < 900
    assert re.search(r"!\[[^\]]+\]\(docs/pictures/\w+\.png\)", readme)


def test_every_page_is_in_the_site_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/]+\.md)\b", nav)
    for folder in ("directives", "mistakes"):  # by a hook
        index = (DOCS / folder / "README.md").read_text()
        listed += [f"{folder}/{file}" for file in re.findall(r"\]\((\w+\.md)\)", index)]
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if not page.endswith(".in.md"))


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_begins_with_an_example(page: Path) -> None:
    title, _, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ") and re.match(r"```(python|console)|!\[", first)
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        ast.parse(code)


def test_there_is_a_guide() -> None:
    assert 8 <= len(GUIDE) <= 12
