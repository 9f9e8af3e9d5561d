"""The pages of docs: what schedules.md shows is what happens, and what is generated is up to date."""

import argparse
import doctest
import importlib.util
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import piper
from piper import errors
from piper.cli.main import main, whole_parser
from piper.compiler.stage_graphs import Stages
from piper.directives import shard
from piper.directives.schedule import Schedule
from piper.plan.tasks import TASKS
from tests.zoo import program_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text()
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


@pytest.mark.xdist_group("moe")
def test_the_directive_of_the_page_works() -> None:
    page = (DOCS / "adding_a_directive.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {"where": piper.where}
    exec(compile(code, "adding_a_directive.md", "exec"), names)
    job = program_of("moe").apply(names["strategy"]).lower()
    sent = {comm.stream.partition(":")[0] for comm in job.graph.comms if comm.comm == "send"}
    assert sent == {"fast"}
    with pytest.raises(piper.PiperError, match=r"route .*no stream is called 'fst'"):
        program_of("moe").apply(lambda s: s.route(piper.where(), stream="fst"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("piper_docs", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["piper_docs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generate: ModuleType) -> None:
    pages = generate.pages()
    for path, text in pages.items():
        assert (DOCS / path).read_text() == text, f"{path} is out of date: make docs"
    for folder in generate.GENERATED:
        found = {str(path.relative_to(DOCS)) for path in DOCS.glob(f"{folder}/*.md")}
        assert found == {path for path in pages if path.startswith(f"{folder}/")}


def test_the_reference_has_all_public_names_commands_and_tasks(generate: ModuleType) -> None:
    topics = generate.reference.TOPICS
    assert sorted(name for names in topics.values() for name in names) == sorted(piper.__all__)
    commands = (DOCS / "reference" / "cli.md").read_text()
    for name, parser in whole_parser().commands.items():
        assert f"### piper {name}\n" in commands
        for action in parser.actions:
            hidden = action.help == argparse.SUPPRESS or "--help" in action.option_strings
            assert hidden or all(option in commands for option in action.option_strings)
    plan = (DOCS / "reference" / "plan.md").read_text()
    assert all(f"### {kind}\n" in plan for kind in TASKS)


def test_rewrites_in_docstrings_are_what_the_code_does(generate: ModuleType) -> None:
    for path, text in generate.docstrings().items():
        assert path.read_text() == text, f"{path.name} is out of date: make docs"
    for name in generate.directives():
        written = [part.sections["Rewrite"] for part in generate.parts_of(name)]
        assert written == generate.rewrites.rewrites_of(name), name


def test_a_change_of_a_rewrite_shows(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = generate.rewrites.CASES["shard"]
    before = generate.rewrites.rewrite_text(*case)
    monkeypatch.setattr(shard, "DEFAULT_STREAM", "elsewhere")
    after = generate.rewrites.rewrite_text(*case)
    assert before.replace("stream=exchange", "stream=elsewhere") == after != before


def test_every_method_of_schedule_is_a_directive_with_all_sections(generate: ModuleType) -> None:
    public = {n for n, f in vars(Schedule).items() if inspect.isfunction(f) and n[0] != "_"}
    assert set(generate.directives()) == public - {"apply", "finish", "stage_costs"}
    for name in generate.directives():
        for part in generate.parts_of(name):
            assert part.summary and set(part.sections) == set(generate.SECTIONS), name
            assert re.match(r"\d+\. ", part.sections["Requires"]), name


@pytest.mark.xdist_group("moe")
def test_examples_of_all_directives(generate: ModuleType) -> None:
    for name in generate.directives():
        for part in generate.parts_of(name):
            program = program_of("untagged" if name == "cut" else "moe")
            s = Schedule(program.graph, stages=Stages(program.source, None))
            names = {"s": s, "where": piper.where, "piper": piper}
            if name != "mesh":
                names["mesh"] = s.mesh(pp=2, dp=2, ep=2)
            example = part.sections["Example"] + "\n"
            test = doctest.DocTestParser().get_doctest(example, names, name, name, 0)
            assert test.examples
            assert doctest.DocTestRunner().run(test).failed == 0, name


def test_every_refused_program_is_in_the_index(generate: ModuleType) -> None:
    page = (DOCS / "errors.md").read_text()
    refused = generate.refusals()
    assert len({item.title for item in refused}) == len(refused)
    for item in refused:
        assert item.title and item.printed in page and item.program in page
        assert item.legal or item.kind == generate.OWN
    kinds = {name for name, found in vars(errors).items() if _is_error(found)}
    listed = [kind for kinds in generate.MET.values() for kind in kinds]
    assert sorted(listed) == sorted({*kinds - {"PiperError"}, generate.OWN})


def _is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, errors.PiperError)


def test_words_of_the_glossary_are_written_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.M)[1:]
    words = [word.strip() for row in rows for word in row.split(",")]
    assert len(words) == len(set(words)) and "Chunk" in words and "slice" in words
    assert "| word |" not in (DOCS / "architecture.md").read_text()


def test_files_that_the_architecture_names_exist_once() -> None:
    text = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"\*\*(?:[a-z_]+/)*([a-z_]+\.py)\*\*", text))
    files = [p.name for p in (DOCS.parent / "src" / "piper").rglob("*.py")]
    counted = Counter(name for name in files if name not in ("__init__.py", "__main__.py"))
    assert named and named <= counted.keys(), named - counted.keys()
    assert max(counted.values()) == 1, "a file's name tells a stranger what is inside"
