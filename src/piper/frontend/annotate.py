"""Tags on model code: `annotate` around code, `tag` from outside by module names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from piper.errors import Call, TraceError, did_you_mean, user_source

PREFIX = "piper:"  # our keys among the annotations that a node may carry
WRONG_TAG = "annotate takes the name of a tag"
_ATTRIBUTE = "_piper_tags"

_next_value: dict[str, int] = {}
_counting = False


def annotate(
    name: str = "", value: int | None = None, **others: Any
) -> AbstractContextManager[Any]:
    """Tag the code inside the `with`: the regions of one name count 0, 1, ... in trace order.

    `with piper.annotate("PP"): ...`; regions of different names nest. Outside of tracing it does
    nothing.
    """
    if others or not name or not isinstance(name, str):
        raise TypeError(WRONG_TAG)
    if not _counting:  # nothing changes from call to call, which a compiler would look at
        return nullcontext()
    if value is None:
        value = _next_value.get(name, 0)
        _next_value[name] = value + 1
    return torch.fx.traceback.annotate({PREFIX + name: value})


@contextmanager
def counting_regions() -> Iterator[None]:
    """While a step is traced: regions get their tags, and those of a name count from 0."""
    global _counting
    _next_value.clear()
    _counting, before = True, _counting
    try:
        yield
    finally:
        _counting = before


def tag(model: nn.Module, **tags: str | Sequence[Sequence[str] | str]) -> nn.Module:
    """Tag whole modules from outside, without touching the model's code.

    `piper.tag(model, PP=[["embed", "layers.0"], ["layers.1", "head"]], EP="layers.*.experts")`: a list
    gives one value per entry; a pattern gives each module it matches a value of its own.
    """
    known = [name for name, _ in model.named_modules() if name]
    found: dict[str, dict[str, int]] = dict(getattr(model, _ATTRIBUTE, {}))
    for name, patterns in tags.items():
        paths: dict[str, int] = {}
        if isinstance(patterns, str):
            for value, path in enumerate(_matching(patterns, known, name)):
                paths[path] = value
        else:
            for value, entry in enumerate(patterns):
                for pattern in [entry] if isinstance(entry, str) else entry:
                    paths |= dict.fromkeys(_matching(pattern, known, name), value)
        found[name] = paths
    setattr(model, _ATTRIBUTE, found)
    return model


def _matching(pattern: str, known: list[str], name: str) -> list[str]:
    paths = [path for path in known if fnmatch.fnmatchcase(path, pattern)]
    if not paths:
        raise TraceError(
            f"{name}: no module is called {pattern!r}{did_you_mean(pattern, known)}",
            call=Call("tag", user_source()),
        )
    return paths


def untag(model: nn.Module, name: str, paths: Iterable[str]) -> None:
    """Take a tag off modules whose code gives it to a part of itself."""
    given = module_tags(model).get(name)
    if given:
        kept = {path: value for path, value in given.items() if path not in set(paths)}
        setattr(model, _ATTRIBUTE, {**module_tags(model), name: kept})


def module_tags(model: nn.Module) -> Mapping[str, Mapping[str, int]]:
    """Tag name -> module path -> value, as `tag` was told."""
    return getattr(model, _ATTRIBUTE, {})
