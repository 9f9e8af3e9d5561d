"""The reference that follows from the code: public names, parsers of commands and types of plans in,
markdown out. `docs/generate.py` writes it."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

import piper
from piper.cli.command_parser import CommandParser, HelpText
from piper.cli.main import GROUPS, whole_parser
from piper.directives.registry import SHIPPED
from piper.directives.schedule import Schedule
from piper.ir.directive import kind_of
from piper.plan.slots import Slot
from piper.plan.tasks import TASKS, Task
from piper.plan.types import VERSION, Bucket, ModelTensor, ParamGroup, Plan, RankClass

TOPICS = {
    "From a model to a program": ("annotate", "tag", "trace", "Program", "load_program"),
    "Strategies": ("Schedule", "where", "Mesh", "strategies", "schedules"),
    "Jobs and runs": ("Job", "load_job", "Plan", "Run", "StepResult", "LocalPool", "warm_up"),
    "Optimizers and precision": ("adamw", "sgd", "Precision"),
    "Training": (
        *("train", "Training", "Share", "Callback", "JsonLines", "TensorBoard", "Elastic"),
        *("profile", "Profile"),
    ),
    "Experts": ("mixture", "grouped_mm"),
    "Errors": ("PiperError",),
}
HANDED_OUT = {  # Piper makes them, not you
    "Job": "`program.lower(...)` gives one, and `piper.load_job(path)`.",
    "Plan": "`job.plan` is one. [The plan format](plan.md) has its fields.",
    "Profile": "`piper.profile(job, batch)` gives one.",
    "Program": "`piper.trace(...)` gives one, and `piper.load_program(path)`.",
    "Run": "`job.launch(...)` gives one, and `job.resume(...)`.",
    "Schedule": "A strategy is called with one.",
    "Share": "A data function is called with one.",
    "StepResult": "`run.step(batch)` gives one.",
    "Training": "`piper.train(...)` gives one.",
}
WIDTH = 96


def api_page(note: str) -> str:
    lines = [note, "", "# The Python API", ""]
    lines += ["```python", "import piper", "", "program = piper.trace(model, batch, step)"]
    lines += ["job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))"]
    lines += ["training = piper.train(job, data, steps=100)", "```", ""]
    lines += ["These are all public names, with their docstrings. A class that you do not make", ""]
    lines[-1:] = ["yourself says where it comes from.", ""]
    for topic, names in TOPICS.items():
        lines += [f"## {topic}", ""]
        for name in names:
            lines += _member(name)
    return "\n".join(lines)


def _member(name: str) -> Iterator[str]:
    member = getattr(piper, name)
    yield from (f"### piper.{name}", "")
    if inspect.ismodule(member):
        yield from _module(name, member)
        return
    if name in HANDED_OUT:
        yield from (HANDED_OUT[name], "")
    else:
        yield from ("```python", signature_text(f"piper.{name}", member), "```", "")
    yield from (_doc(member), "")
    if inspect.isclass(member):
        yield from _methods(name, member)


def _methods(name: str, cls: type) -> Iterator[str]:
    directives = {kind_of(each) for each in SHIPPED} if cls is Schedule else set()
    if directives:
        yield from ("Its directives have [pages of their own](../directives/README.md).", "")
    for attribute, member in vars(cls).items():
        if attribute.startswith("_") or attribute in directives or hasattr(cls.__base__, attribute):
            continue
        doc = _doc(member) if callable(member) or _is_property(member) else ""
        if not (doc or inspect.isfunction(member)) or isinstance(member, type):
            continue
        yield from (f"#### {name}.{attribute}", "")
        if not _is_property(member):
            function = getattr(cls, attribute)
            yield from ("```python", signature_text(f"{name}.{attribute}", function), "```", "")
        yield from (doc, "") if doc else ()


def _is_property(member: object) -> bool:
    return isinstance(member, (property, functools.cached_property, classmethod))


def _module(name: str, module: Any) -> Iterator[str]:
    yield from (_doc(module), "", "| name | what it is |", "|---|---|")
    for each in module.__all__:
        member = getattr(module, each)
        known = inspect.isfunction(member) or inspect.isclass(member)
        first = (inspect.getdoc(member) or "").split("\n\n")[0] if known else "all of them by name"
        yield f"| `piper.{name}.{each}` | {_in_a_cell(first)} |"
    yield ""


def _doc(member: Any) -> str:
    return inspect.getdoc(_function(member)) or ""


def _function(member: Any) -> Any:
    """The user's function behind a custom operator of torch."""
    return getattr(member, "_init_fn", member)


def signature_text(name: str, member: Any) -> str:
    """A signature as it is written in the code: on one line, or with an argument a line."""
    parameters = list(inspect.signature(_function(member)).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    words: list[str] = []
    for before, each in zip([None, *parameters], parameters, strict=False):
        opened = before is not None and before.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        if each.kind is each.KEYWORD_ONLY and not opened:
            words.append("*")
        words.append(_parameter(each))
    returned = "" if inspect.isclass(member) else _returned(member)
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returned}"])


def _returned(function: Any) -> str:
    annotation = inspect.signature(_function(function)).return_annotation
    return "" if annotation is inspect.Signature.empty else f" -> {_type_text(annotation)}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    annotated = parameter.annotation is not parameter.empty
    if annotated:
        text += f": {_type_text(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    default = "..." if default.startswith("<") else default
    return f"{text} = {default}" if annotated else f"{text}={default}"


def _type_text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def cli_page(note: str) -> str:
    parser = whole_parser()
    lines = [note, "", "# Commands and their options", ""]
    lines += ["```console", *(f"$ {line}" for line in _examples(parser)), "```", ""]
    lines += ["[The command line](../command_line.md) has what all commands share. This page has"]
    lines += ["what `piper COMMAND --help` prints.", ""]
    for title, names in GROUPS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        for name in names:
            lines += _command(f"piper {name}", parser.commands[name], "###")
    return "\n".join(lines)


def _command(name: str, parser: CommandParser, level: str) -> Iterator[str]:
    yield from (f"{level} {name}", "")
    if parser.usage:
        yield from ("```text", parser.usage.replace("%(prog)s", name), "```", "")
    if parser.description:
        yield from (" ".join(parser.description.split()), "")
    formatter = HelpText(name)
    for group in parser.groups:
        shown = [action for action in group._group_actions if _is_shown(action)]
        if not shown:
            continue
        title = "arguments" if group.title == "positional arguments" else group.title or "options"
        yield from (f"| {title} | |", "|---|---|")
        for action in shown:
            yield f"| {_in_code(_invocation(action))} | {_help_of(action, formatter)} |"
        yield ""
    for inner, command in parser.commands.items():
        yield from _command(f"{name} {inner}", command, f"{level}#")
    examples = _examples(parser)
    if examples:
        yield from ("```console", *(f"$ {line}" for line in examples), "```", "")


def _is_shown(action: argparse.Action) -> bool:
    hidden = action.help == argparse.SUPPRESS or "--help" in action.option_strings
    return not hidden and not isinstance(action, argparse._SubParsersAction)


def _invocation(action: argparse.Action) -> str:
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    value = metavar or choices or action.dest.upper()
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _help_of(action: argparse.Action, formatter: HelpText) -> str:
    return _in_a_cell(formatter._expand_help(action)) if action.help else ""


def _examples(parser: CommandParser) -> list[str]:
    epilog = parser.epilog or ""
    if "examples:" not in epilog:
        return []
    return [line.strip() for line in epilog.split("examples:")[1].splitlines() if line.strip()]


def plan_page(note: str) -> str:
    lines = [note, "", "# The plan format", ""]
    lines += ["```console", "$ piper plan FILE.py --pp 2 --dp 2 --out plan.json"]
    lines += [
        "$ piper check plan.json",
        "$ piper train plan.json --data FILE.py --steps 10",
        "```",
        "",
    ]
    lines += [
        "A plan is JSON, and holds data alone. `piper plan --out` writes it, `job.save(path)` too; the",
        "bodies of chunks stand beside it in the same file, as text. Whoever reads a plan proves it",
        f"again before it runs. This is version {VERSION}; a file of another version is refused.",
        "[One tensor through Piper](../one_tensor.md) shows a chunk of a model in the plan.",
        "",
    ]
    for cls in (Plan, RankClass, Slot, Bucket, ModelTensor, ParamGroup, Task):
        lines += [f"## {cls.__name__}", "", inspect.getdoc(cls) or "", "", *_fields(cls), ""]
    lines += ["## Kinds of tasks", ""]
    lines += ["`kind` says which one a task is. Each has the fields of a Task, and its own.", ""]
    for kind, cls in TASKS.items():
        lines += [f"### {kind}", "", inspect.getdoc(cls) or "", "", *_fields(cls, base=Task), ""]
    return "\n".join(lines)


def _fields(cls: type, base: type | None = None) -> list[str]:
    """The fields of a struct that its base does not have, with their types as the code has them."""
    written = {
        k: v
        for each in reversed(cls.__mro__)
        for k, v in vars(each).get("__annotations__", {}).items()
    }
    known = {field.name for field in msgspec.structs.fields(base)} if base else set()
    rows = [
        f"| `{field.encode_name}` | {_in_code(_type_text(written[field.name]))} |{_default(field)} |"
        for field in msgspec.structs.fields(cls)
        if field.name not in known
    ]
    return ["| field | type | without it |", "|---|---|---|", *rows] if rows else []


def _default(field: Any) -> str:
    if field.default is msgspec.NODEFAULT:
        made = field.default_factory
        return "" if made is msgspec.NODEFAULT else f" {_in_code(repr(made()))}"
    return (
        f" {_in_code(repr(field.default))}" if not isinstance(field.default, msgspec.Struct) else ""
    )


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _in_code(text: str) -> str:
    return f"`{_in_a_cell(text)}`"
