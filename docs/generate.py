"""The pages that follow from the code: docstrings, parsers and golden errors in, markdown out.

`make docs` writes them, and the Rewrite sections of the docstrings, which follow from what directives do
to small programs; a test fails if what is committed differs.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import piper.cli.user_file
import piper.errors
from piper.directives.registry import SHIPPED
from piper.directives.schedule import Schedule, shown_signature
from piper.files import module_of
from piper.ir.directive import Directive, kind_of

DOCS = Path(__file__).parent
PROGRAMS = DOCS.parent / "tests" / "error" / "programs"
NOTE = "<!-- written by docs/generate.py -->"
SECTIONS = ("Requires", "Rewrite", "Example")
OWN = "Errors of your own code"
# The errors by who meets them, in the order of the page; a test holds it to the classes.
MET = {
    "Writing a model, or a step": ("TraceError", OWN),
    "Writing a strategy": (
        "SelectError", "ArgumentError", "MeshError", "PlaceError", "AxisError", "ShardError",
        "TensorError", "SplitError", "RecomputeError", "CutError", "OrderError", "ScheduleError",
        "StrategyError", "NoSuchAttribute",
    ),
    "Choosing an optimizer, weights, files and options": (
        "PlanError", "WeightsError", "FileError", "OptionError",
    ),
    "Running": ("CheckError", "RunError", "RankLost", "OutOfMemory"),
}  # fmt: skip
GENERATED = ("directives", "mistakes", "reference")  # folders that hold nothing else
CLASSES: dict[str, type[Directive]] = {kind_of(cls): cls for cls in SHIPPED}

rewrites = module_of(str(DOCS / "rewrites.py"))
gallery = module_of(str(DOCS / "gallery.py"))
one_tensor = module_of(str(DOCS / "one_tensor.py"))
reference = module_of(str(DOCS / "reference.py"))
mistakes = module_of(str(DOCS / "mistakes.py"))


@dataclass(frozen=True)
class Part:
    """One form of a directive: what it does, and its sections by name."""

    title: str  # empty for the first form
    summary: str
    sections: dict[str, str]


@dataclass(frozen=True)
class Refusal:
    """A program that is refused, and the text of its error."""

    file: str
    title: str
    kind: str
    directive: str
    program: str
    printed: str
    legal: str


def directives() -> list[str]:
    """All directives by the names of their methods."""
    return list(CLASSES)


def parts_of(name: str) -> list[Part]:
    """The docstring of a directive; a line `With ...:` begins another form of it."""
    docstring = CLASSES[name].__doc__ or ""
    first, *more = re.split(r"^\s*(With [^\n]*):\s*$", docstring, flags=re.M)
    forms = [("", first), *zip(more[::2], more[1::2], strict=True)]
    return [_part(title, text) for title, text in forms]


def _part(title: str, text: str) -> Part:
    text = inspect.cleandoc(text.strip("\n") if title else text)
    summary, *rest = re.split(rf"^({'|'.join(SECTIONS)}):\s*$", text, flags=re.M)
    sections = {rest[i]: textwrap.dedent(rest[i + 1]).strip() for i in range(0, len(rest), 2)}
    return Part(title, summary.strip(), sections)


def refusals() -> list[Refusal]:
    """The golden programs, in the order of their names."""
    return [
        _refusal(path.name, path.read_text(), path.with_suffix(".txt").read_text())
        for path in sorted(PROGRAMS.glob("*.py"))
        if not path.stem.startswith("_")
    ]


def _refusal(file: str, program: str, printed: str) -> Refusal:
    title = (ast.get_docstring(ast.parse(program)) or "").rstrip(".")
    body = re.sub(r'\A""".*?"""\s*', "", program, flags=re.S)
    body = re.sub(r"^from _model import .*\n", "", body, flags=re.M)
    head = re.match(r"(\w+Error): (?:(\w+) \()?", printed)
    legal = re.search(r"^  legal: (.*)", printed, re.M | re.S)
    kind = head[1] if head and _class(head[1]) else OWN
    return Refusal(
        file=file,
        title=title,
        kind=kind,
        directive=(head[2] or "") if head else "",
        program=body.strip(),
        printed=printed.rstrip(),
        legal=" ".join(legal[1].split()) if legal else "",
    )


def _class(name: str) -> type | None:
    return getattr(piper.errors, name, None) or getattr(piper.cli.user_file, name, None)


def directive_page(name: str, refused: list[Refusal]) -> str:
    lines = [NOTE, "", f"# {name}", ""]
    for part, rewrite in zip(parts_of(name), rewrites.rewrites_of(name), strict=True):
        if part.title:
            lines += [f"## {part.title}", ""]
        lines += [part.summary, ""]
        lines += [] if part.title else ["```python", signature(name), "```", ""]
        level = "###" if part.title else "##"
        if "Requires" in part.sections:
            lines += [f"{level} Requirements", "", *_numbered(part.sections["Requires"]), ""]
        if "Rewrite" in part.sections:
            lines += [f"{level} Rewrite", "", "```text", rewrite, "```", ""]
        if "Example" in part.sections:
            lines += [f"{level} Example", "", "```pycon", part.sections["Example"], "```", ""]
    mine = [item for item in refused if item.directive == name]
    if mine:
        lines += [
            "## Errors",
            "",
            "The first line of an error ends in the number of the requirement.",
            "",
        ]
        lines += [f"- [{item.title}](../errors.md#{_anchor(item.title)})" for item in mine]
        lines.append("")
    return "\n".join(lines)


def signature(name: str) -> str:
    """`s.place(selector, at, *, stream=None)`."""
    of_method = inspect.signature(getattr(Schedule, name))
    taken = list(of_method.parameters.values())[1:]
    return shown_signature(name, of_method.replace(parameters=taken))


def _numbered(text: str) -> Iterator[str]:
    """`1. ...` with the lines that continue an item under its words."""
    for line in text.splitlines():
        yield line if re.match(r"\d+\.", line) else f"   {line.strip()}"


def index_page() -> str:
    lines = [
        NOTE,
        "",
        "# Directives",
        "",
        "A strategy is a function of a `Schedule` `s`; each method of it is one checked rewrite of the",
        "logical graph, recorded with the user's line. `where(...)` selects nodes by tag. The examples",
        'run on a model with two stages (`annotate("PP")`), each with experts (`annotate("EP")`), after',
        "`mesh = s.mesh(pp=2, dp=2, ep=2)`. A rewrite shows what the directive does to a smaller model:",
        "what goes (`-`), what comes (`+`), and which fields of which nodes and Values change.",
        "",
        "| directive | what it does |",
        "|---|---|",
    ]
    for name in directives():
        summary = " ".join(parts_of(name)[0].summary.split("\n\n")[0].split())
        lines.append(f"| [{name}]({name}.md) | {summary} |")
    return "\n".join([*lines, ""])


def errors_page(refused: list[Refusal]) -> str:
    lines = [
        NOTE,
        "",
        "# Errors",
        "",
        "```text",
        next(item.printed for item in refused if item.file == "cyclic_order.py"),
        "```",
        "",
        "An error says which rule was broken, in which line of your own file, with which nodes, and",
        "what would be legal. This page has the errors by their kinds, and programs that meet them.",
        "Each program is a test; those that show no model train the one of",
        "[_model.py](../tests/error/programs/_model.py): two stages, of which the second has experts.",
        "[Common mistakes](mistakes/README.md) of a first day are mended on a page each. All errors of",
        "Piper's are `piper.PiperError`, which is a ValueError.",
        "",
    ]
    for when, kinds in MET.items():
        lines += [f"**{when}**", "", "| error | meaning | programs |", "|---|---|---|"]
        for kind in kinds:
            count = sum(item.kind == kind for item in refused)
            name = f"[{kind}](#{_anchor(kind)})" if count else kind
            lines.append(f"| {name} | {_meaning(kind)} | {count or ''} |")
        lines.append("")
    for kind in (kind for kinds in MET.values() for kind in kinds):
        mine = [item for item in refused if item.kind == kind]
        lines += _kind_section(kind, mine) if mine else []
    return "\n".join([*lines, ""])


def _kind_section(kind: str, mine: list[Refusal]) -> Iterator[str]:
    """An error with what it means, and its programs with links to them in front."""
    known = _class(kind)
    yield from (f"## {kind}", "", inspect.getdoc(known) if known else _meaning(kind), "")
    if len(mine) > 1:
        yield from (f"- [{item.title}](#{_anchor(item.title)})" for item in mine)
        yield ""
    for item in mine:
        yield from (f"### {item.title}", "")
        yield from (f"[{item.file}](../tests/error/programs/{item.file})", "")
        yield from ("```python", item.program, "```", "", "```text", item.printed, "```", "")
        if item.legal:
            yield from (f"How to fix: {item.legal}", "")


def _meaning(kind: str) -> str:
    known = _class(kind)
    if known is None:
        return "Piper adds the line and gets out of the way."
    return (inspect.getdoc(known) or "").partition("\n")[0]


def _anchor(title: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def pages() -> dict[str, str]:
    """All generated pages, and the pictures of the gallery, by their path under docs/."""
    refused = refusals()
    by_path = {f"directives/{name}.md": directive_page(name, refused) for name in directives()}
    by_path["directives/README.md"] = index_page()
    by_path["errors.md"] = errors_page(refused)
    by_path["one_tensor.md"] = one_tensor.page(NOTE)
    by_path |= gallery.files(NOTE)
    by_path["index.md"] = first_page((DOCS.parent / "README.md").read_text())
    by_path |= mistakes.pages(NOTE)
    by_path["reference/api.md"] = reference.api_page(NOTE)
    by_path["reference/cli.md"] = reference.cli_page(NOTE)
    by_path["reference/plan.md"] = reference.plan_page(NOTE)
    return by_path


def first_page(readme: str) -> str:
    """The README as the first page of the site: its links begin in docs."""
    lines = re.sub(r"\]\((?!\w+:|#|docs/)", "](../", readme)
    return f"{NOTE}\n\n{lines.replace('](docs/', '](')}"


def docstrings() -> dict[Path, str]:
    """The files of all directives, with Rewrite sections that say what the code does."""
    return {
        path: rewrites.in_docstring(path.read_text(), rewrites.rewrites_of(name))
        for name, cls in CLASSES.items()
        for path in [Path(inspect.getsourcefile(cls) or "")]
    }


def main() -> int:
    for path, text in docstrings().items():
        path.write_text(text)
    by_path = pages()
    for folder in GENERATED:
        (DOCS / folder).mkdir(exist_ok=True)
        for stale in (DOCS / folder).glob("*.md"):
            if str(stale.relative_to(DOCS)) not in by_path:
                stale.unlink()
    for path, text in by_path.items():
        (DOCS / path).write_text(text)
    print(f"wrote {len(by_path)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
