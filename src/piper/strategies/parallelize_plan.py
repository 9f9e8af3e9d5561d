"""parallelize_plan: a plan for torch's `parallelize_module` in, the `params` of shard_tensor out.

Styles are known by the names of their classes, so that nothing of torch is needed to read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from piper.errors import TensorError, did_you_mean

_STYLES: dict[str, dict[str, int] | None] = {
    "ColwiseParallel": {"weight": 0, "bias": 0},
    "RowwiseParallel": {"weight": 1},
    "SequenceParallel": None,  # cuts no parameter: `sequence=` of the directive is its like
    "PrepareModuleInput": None,
    "PrepareModuleOutput": None,
    "PrepareModuleInputOutput": None,
}
_TABLES: dict[str, dict[str, int]] = {  # of an embedding the rows come first
    "ColwiseParallel": {"weight": 1},
    "RowwiseParallel": {"weight": 0},
}


def tensor_params(model: Any, plan: Mapping[str, Any]) -> dict[str, int]:
    """Along which dim each parameter is cut by a plan for `parallelize_module(model, mesh, plan)`.

    `model` is a module, on any device; only its modules' paths and classes are looked at. A style says
    where communication goes, too; here that follows from the code.
    """
    modules = dict(model.named_modules())
    found: dict[str, int] = {}
    for path, style in plan.items():
        kind = type(style).__name__
        if kind not in _STYLES:
            raise TensorError(
                f"{path}: the style {kind} is not known", legal=", ".join(sorted(_STYLES))
            )
        for name in _matching(path, modules):
            dims = _STYLES[kind] or {}
            if type(modules[name]).__name__ == "Embedding":
                dims = _TABLES.get(kind, {})
            own = {n for n, _ in modules[name].named_parameters(recurse=False)}
            found |= {f"{name}.{param}": dim for param, dim in dims.items() if param in own}
    return found


def _matching(path: str, modules: Mapping[str, Any]) -> Iterator[str]:
    """The modules of a path, in which each word may be a pattern."""
    words = path.split(".")
    names = [
        name
        for name in modules
        if len(parts := name.split(".")) == len(words)
        and all(fnmatchcase(part, word) for part, word in zip(parts, words, strict=True))
    ]
    if not names:
        raise TensorError(
            f"no module is called {path!r}{did_you_mean(path, list(modules))}",
            legal="paths of modules of the model",
        )
    yield from names
