"""The mended programs of docs/mistakes: each trains and prints its loss."""

import math
import runpy
from pathlib import Path

import pytest

from piper.files import module_of

HERE = Path(__file__).parent
MENDED = sorted(path.stem for path in (HERE / "mended").glob("*.py"))
IN_PROCESSES = ["unguarded"]  # tests/procs/test_unguarded.py runs it
DOCS = HERE.parents[1] / "docs"


@pytest.mark.parametrize("name", [name for name in MENDED if name not in IN_PROCESSES])
def test_a_mended_program_trains(
    name: str, imported: None, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(HERE / "mended" / f"{name}.py"), run_name="__main__")
    assert math.isfinite(float(capsys.readouterr().out.splitlines()[-1]))


def test_every_mended_program_has_a_page_with_all_its_parts() -> None:
    mistakes = module_of(str(DOCS / "mistakes.py"))
    listed = [name for names in mistakes.GROUPS.values() for name in names]
    assert sorted(listed) == MENDED and len(listed) >= 25
    titles = []
    for name in listed:
        found = mistakes.mistake(name)
        titles.append(found.title)
        assert found.program != found.mended and found.why and "](../" in found.see, name
        page = (DOCS / "mistakes" / f"{name}.md").read_text()
        for part in (found.program, found.printed, found.why, found.mended, found.see):
            assert part in page, name
    assert len(set(titles)) == len(titles)
