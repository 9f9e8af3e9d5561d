"""The lessons and the gallery, without a run: nothing is left out, and pages show the scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from piper.cli.main import main
from piper.files import module_of
from piper.schedules import SCHEDULES, describe
from tests.same_text import difference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
lessons = module_of(str(DOCS / "lessons.py"))
NAMES = lessons.names()


def test_ten_lessons_have_a_script_a_page_and_a_place_in_the_contents() -> None:
    assert [name[:2] for name in NAMES] == [f"{number:02}" for number in range(1, 11)]
    pages = {path.stem for path in (DOCS / "lessons").glob("[0-9]*.md") if ".in." not in path.name}
    assert pages == set(NAMES)
    contents = (ROOT / "mkdocs.yml").read_text()
    for name in NAMES:
        assert f": lessons/{name}.md\n" in contents
        assert len(lessons.source(name).splitlines()) <= 80
    assert (DOCS / "lessons" / "README.md").read_text() == lessons.index_page(), "make docs"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_whole_script(name: str) -> None:
    page = (DOCS / "lessons" / f"{name}.md").read_text()
    shown = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    own = re.findall(r"```python\n(.*?)\n```", lessons.template(name), re.DOTALL)
    assert [code for code in shown if code not in own] == lessons.sections(lessons.source(name))
    assert ("## Exercises" in page and "Go on with" in page) or name == NAMES[-1]


def test_a_page_that_leaves_something_out_is_an_error(tmp_path: Path) -> None:
    printed = "a plan\n\nlosses"
    with pytest.raises(AssertionError, match="does not show"):
        lessons.page(NAMES[0], "\n\n".join([printed] * 9), tmp_path)


def test_the_gallery_has_all_schedules_and_its_commands_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (DOCS / "gallery.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.M) == list(SCHEDULES)
    for name in SCHEDULES:
        about = describe(name)
        assert about.trades.endswith(".") and re.search(r", (arXiv \d|https://)", about.published)
    pictures = {path.stem for path in (DOCS / "pictures" / "gallery").iterdir()}
    assert pictures == set(SCHEDULES)
    for command in re.findall(r"^\$ piper (.*)$", page, re.M):
        assert main(command.split()) == 0
        said = capsys.readouterr().out
        bubble = re.search(r"bubble +(\S+%)", said)
        name = command.split()[1]
        assert bubble and re.search(rf"^\| \[{name}\].*", page, re.M)
        row = re.search(rf"^\| \[{name}\]\S* \| \d \| (\S+%)", page, re.M)
        assert row and float(row[1][:-1]) == pytest.approx(float(bubble[1][:-1]), abs=0.06)


def test_texts_are_the_same_but_for_small_differences_of_numbers() -> None:
    shown = "step 1  45.80 ms\nplan 0123456789abcdef: B[PP=0,MB=1]"
    assert not difference(shown, "step 1 45.9 ms\nplan fedcba9876543210: B[PP=0,MB=1]")
    assert "46.8" in difference(shown, shown.replace("45.80", "46.8"))
    assert difference(shown, shown.replace("MB=1", "MB=2"))
    assert difference(shown, shown.replace("ms", "s"))
    assert difference(shown, f"{shown}\nmore") and difference(f"{shown}\nmore", shown)
