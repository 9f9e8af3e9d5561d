"""The pages of common mistakes: wrong programs, their golden errors or warnings and the mended programs
in, markdown out.

A mended program lies in tests/error/mended, under the name of the wrong one; its docstring says why, and
what to read. Tests run all of them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
MENDED = TESTS / "error" / "mended"
FIRST, MODEL = TESTS / "error" / "scripts" / "_first.py", TESTS / "error" / "programs" / "_model.py"
WRONG = (FIRST.parent, MODEL.parent, TESTS / "error" / "warned", TESTS / "procs")
SAYS = {
    MODEL.parent: "`piper plan {file}` prints",
    WRONG[2]: "Piper warns",
}  # else an error is raised
FOLDER = "mistakes"
NOQA = "  # noqa: F401"
IMPORTED = {
    "_first": "a model of two stages with its batch, its step, and a job of it",
    "_model": "a model of two stages, the second with experts, with its batch and its step",
}
# The order of the pages; a test holds it to the mended programs.
GROUPS = {
    "Model and step": (
        "model_instance", "step_signature", "step_returns_nothing", "step_returns_rows",
        "step_returns_logits", "step_returns_dict", "key_of_batch", "label_dtype_traced",
        "detached_loss", "backward_in_step", "annotate_keyword",
    ),
    "Code that a plan cannot hold": (
        "global_tensor", "plain_tensor", "if_on_tensor", "item_in_forward", "host_random",
        "cuda_in_forward",
    ),
    "Optimizers and precision": (
        "optimizer_instance", "optimizer_of_model", "optimizer_name", "optimizer_elsewhere",
        "optimizer_leaves_out", "optimizer_in_step", "grad_scaler", "precision_unknown",
    ),
    "Strategies": (
        "strategy_name", "strategy_returns", "zero_text", "microbatches", "unplaced",
        "unowned_axis", "order_before_split",
    ),
    "Training and data": (
        "no_apply", "train_program", "train_batch", "train_dataset", "data_ends", "partial_batch",
        "step_after_close", "unguarded",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A wrong program with its error, and one that works with why the other does not."""

    name: str
    title: str
    wrong: Path
    program: str
    printed: str
    why: str
    see: str
    mended: str


def mistake(name: str) -> Mistake:
    (wrong,) = (path for folder in WRONG if (path := folder / f"{name}.py").exists())
    title, _ = _parted(wrong)
    program = wrong.read_text().replace(NOQA, "").strip()  # whole: the error counts its lines
    text, mended = _parted(MENDED / f"{name}.py")
    why, _, see = text.partition("\n\nSee: ")
    printed = wrong.with_suffix(".txt").read_text().rstrip()
    title = title.partition("\n")[0].rstrip(".")
    return Mistake(name, title, wrong, program, printed, why, " ".join(see.split()), mended)


def _parted(path: Path) -> tuple[str, str]:
    """A file's docstring and its code."""
    text = path.read_text()
    code = re.sub(r'\A""".*?"""\s*', "", text, flags=re.S)
    return ast.get_docstring(ast.parse(text)) or "", code.replace(NOQA, "").strip()


def pages(note: str) -> dict[str, str]:
    """All pages by their path under docs/."""
    found = {group: [mistake(name) for name in names] for group, names in GROUPS.items()}
    by_path = {f"{FOLDER}/{m.name}.md": page(note, m) for each in found.values() for m in each}
    return {f"{FOLDER}/README.md": index(note, found), **by_path}


def page(note: str, found: Mistake) -> str:
    file = found.wrong.relative_to(TESTS.parent)
    what = SAYS.get(found.wrong.parent, "Piper raises").format(file=file.name)
    return "\n".join(
        (
            note, "", f"# {found.title}", "", "```python", found.program, "```", "",
            *_imported(found.program), what, "", "```text", found.printed, "```", "",
            "## Why", "", found.why, "", "## Mended", "", "```python", found.mended, "```", "",
            f"See {found.see}.", "",
            f"Tests run both: [the wrong one](../../{file}) and "
            f"[the mended one](../../tests/error/mended/{file.name}). [All mistakes](README.md)", "",
        )
    )  # fmt: skip


def _imported(program: str) -> list[str]:
    """Where that comes from which a program imports of ours."""
    for module, has in IMPORTED.items():
        if f"from {module} import" in program:
            return [f"`{module}` has {has}: [{module}.py](README.md#what-the-programs-import).", ""]
    return []


def index(note: str, found: dict[str, list[Mistake]]) -> str:
    lines = [
        note,
        "",
        "# Common mistakes",
        "",
        "These are mistakes of a first day with Piper. Each page has a wrong program, the error or",
        "warning as it is printed, the reason, and the program mended. Most import a small model",
        "with its batch and step from `_first.py`, which stands [below](#what-the-programs-import).",
        "[Errors](../errors.md) has all errors by their kinds.",
        "",
    ]
    for group, mistakes in found.items():
        lines += [f"## {group}", "", "| mistake | error or warning |", "|---|---|"]
        for each in mistakes:
            head = textwrap.shorten(each.printed.partition("\n")[0], 150, placeholder=" ...")
            head = head.replace("|", "\\|")
            lines.append(f"| [{each.title}]({each.name}.md) | `{head}` |")
        lines.append("")
    (_, first), (_, model) = _parted(FIRST), _parted(MODEL)
    lines += [
        "## What the programs import",
        "",
        "Save the file that a page names beside its program, and run the program.",
        "",
    ]
    for path, code in ((FIRST, first), (MODEL, model)):
        at = f"[{path.name}](../../{path.relative_to(TESTS.parent)})"
        lines += [f"{at} has {IMPORTED[path.stem]}:", "", "```python", code, "```", ""]
    return "\n".join(lines)
