"""The pages of the lessons: templates, scripts and what they print in; pages out, and their pictures.

In a template `{code}` is the next section of the script, `{output}` the next paragraph that it prints
(`{output 2}` the next two), and `{run 9 COMMAND}` a command of piper with the first 9 lines of what it
prints, in the folder of the script's timelines.
`python docs/lessons.py` runs all scripts and writes all pages; `make docs` calls it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from piper.cli.main import main as piper_command
from piper.files import module_of

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "lessons"
PAGES = ROOT / "docs" / "lessons"
NOTE = "<!-- written by docs/lessons.py -->"
WORDS_A_MINUTE = 150
drawing = module_of(str(ROOT / "docs" / "lesson_pictures.py"))
pictures = drawing.pictures

_EXERCISES = "## Exercises\n"
_ASSERTS = """The script's asserts hold this page to what it says. Your change may break one: delete it,
and go by what is printed."""
_SECTION = re.compile(r"^ *# \d+\. .*\n", re.M)
_MARK = re.compile(r"^\{(code|output|run)(?: (\d+))?(?: (piper [^\n]*))?\}$", re.M)


def names() -> list[str]:
    """All lessons, in their order."""
    return sorted(path.stem for path in SCRIPTS.glob("[0-9][0-9]_*.py"))


def source(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def template(name: str) -> str:
    return (PAGES / f"{name}.in.md").read_text()


def sections(text: str) -> list[str]:
    """The numbered sections of a script, without the comments that head them."""
    _, *found = _SECTION.split(text)
    return [textwrap.dedent(part).strip("\n") for part in found]


def run_script(name: str, folder: Path) -> str:
    """What a lesson prints; that and its timelines lie in the folder."""
    arguments = [str(folder)] if name in drawing.DRAWN else []
    done = subprocess.run(
        [sys.executable, f"examples/lessons/{name}.py", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    folder.mkdir(exist_ok=True)
    (folder / drawing.PRINTED).write_text(done.stdout)
    return done.stdout


def page(name: str, printed: str, folder: Path) -> str:
    """The template with the script's code, what it printed, and what commands print."""
    code = iter(sections(source(name)))
    paragraphs = iter(re.split(r"\n\n+", printed.strip("\n")))

    def filled(mark: re.Match[str]) -> str:
        if mark[1] == "code":
            return f"```python\n{next(code)}\n```"
        if mark[1] == "output":
            text = "\n\n".join(next(paragraphs) for _ in range(int(mark[2] or 1)))
            return f"```text\n{text}\n```"
        lines, most = run_command(mark[3], folder).splitlines(), int(mark[2] or 1000)
        shown = "\n".join([*lines[:most], *(["..."] if len(lines) > most else [])])
        return f"```console\n$ {mark[3]}\n```\n```text\n{shown}\n```"

    text = _MARK.sub(filled, template(name).replace(_EXERCISES, f"{_EXERCISES}\n{_ASSERTS}\n"))
    left = [*code, *paragraphs]
    assert not left, f"{name}.in.md does not show: {left[0]}"
    return f"{NOTE}\n{text}"


def run_command(command: str, folder: Path) -> str:
    """What a command of piper prints, in a folder."""
    said = io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            code = piper_command(shlex.split(command.removeprefix("piper ")))
    finally:
        os.chdir(before)
    differs = 1 if command.startswith("piper diff ") else 0
    assert code == differs, f"{command}: {code}"
    return said.getvalue().strip("\n")


def index_page() -> str:
    """The lessons with what each one teaches, and how long it takes to read."""
    rows = []
    for name in names():
        title = re.search(r"^# (?:\d+\. )?(.*)$", template(name), re.M)
        teaches = re.match(r'"""Lesson \d+: .*?\. (.*)\n', source(name))
        assert title and teaches, name
        minutes = round(len(f"{template(name)} {source(name)}".split()) / WORDS_A_MINUTE)
        rows.append(f"| {int(name[:2])} | [{title[1]}]({name}.md) | {teaches[1]} | {minutes} |")
    return (PAGES / "README.in.md").read_text().format(note=NOTE, rows="\n".join(rows))


def main() -> int:
    """All lessons, or those whose names begin so."""
    chosen = [name for name in names() if name.startswith(tuple(sys.argv[1:]) or "")]
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            printed = run_script(name, Path(folder))
            (PAGES / f"{name}.md").write_text(page(name, printed, Path(folder)))
            for path, svg in pictures(name, Path(folder)).items():
                (ROOT / "docs" / path).write_text(svg)
        print(f"wrote docs/lessons/{name}.md")
    (PAGES / "README.md").write_text(index_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
