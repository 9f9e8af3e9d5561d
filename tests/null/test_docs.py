"""docs/schedules.md: what it shows is what happens."""

import re
from pathlib import Path

import pytest

from piper.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
TABLES = {"deadlock.csv": "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"}


def test_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name, text in TABLES.items():
        (tmp_path / name).write_text(text)
    shown = re.findall(r"```console\n\$ piper (.*)\n([^$]*?)```", PAGE)
    assert len(shown) == 2
    for command, output in shown:
        code = main(command.split())
        printed = capsys.readouterr()
        assert printed.out + printed.err == output
        assert code == (2 if "Error" in output else 0)


def test_the_python_of_the_page_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(compile(program, "schedules.md", "exec"), names)
    assert names["table"].num_microbatches == 2
    assert names["same"].num_stages == 2
