"""Side effects of traced code, as Dynamo notes them: replaced tensors and hooks are refused.

Dynamo keeps them out of the graph, to replay them after it; no step of a plan replays anything.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch._dynamo.side_effects import SideEffects
from torch._guards import TracingContext

from piper.errors import Source, TraceError, is_users
from piper.frontend.refuse.hooks import HOOKS
from piper.frontend.refuse.state import BUFFERS, PARAMETERS

_TENSORS = re.compile(r"(?:\.|__dict__\[')(_buffers|_parameters)(?:'\])?$")
_CHILD = re.compile(r"_modules(?:'\])?\['(.*?)'\]")


@dataclass
class TracedEffects:
    """Dictionaries of a module's tensors that were written to, hooks, and objects that were changed,
    each with the user's line."""

    written: list[tuple[Any, Source | None]] = field(default_factory=list)
    hooks: list[tuple[str, Source | None]] = field(default_factory=list)
    lines: dict[str, Source] = field(default_factory=dict)  # where each object was changed first
    # By the name of an object and of its attribute, the object and what the attribute is at the end.
    stored: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(dict))
    mutated: set[str] = field(default_factory=set)  # objects whose own content was changed

    def note(self, variable: Any) -> None:
        """Where an object of the user's is changed."""
        name = _name(variable)
        if name and name not in self.lines:
            line = _line()
            if line is not None:
                self.lines[name] = line

    def changed(self, name: str) -> bool:
        """Whether an object is another one after the step; one that was set back is not."""
        stored = self.stored.get(name)
        return stored is None or name in self.mutated or not _set_back(stored)

    def refuse(self) -> None:
        """Raise for a hook, and for a parameter that is another one after the step, or a buffer that is
        gone: what replaces a buffer is its next content (see `capture/replaced_buffers.py`)."""
        for name, source in self.hooks:
            raise TraceError(f"the traced code calls {name} ({source})", legal=HOOKS)
        for variable, source in self.written:
            kind = _TENSORS.search(variable.source.name)
            assert kind is not None
            what = "buffer" if kind[1] == "_buffers" else "parameter"
            for key in _gone(variable) if what == "buffer" else _replaced(variable):
                # The first child is the user's model, in the module that is traced.
                path = _CHILD.findall(variable.source.name)[1:]
                raise TraceError(
                    f"{what} {'.'.join([*path, key])} is replaced ({source})",
                    legal=BUFFERS if what == "buffer" else PARAMETERS,
                )


def _set_back(stored: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether every attribute is at the end what it is before the step."""
    for attribute, (variable, value) in stored.items():
        before = getattr(getattr(variable, "value", None), attribute, _set_back)
        if not value.is_python_constant():
            return False
        now = value.as_python_constant()
        if type(before) is not type(now) or before != now:
            return False
    return True


def _replaced(variable: Any) -> list[str]:
    """The names in a dictionary that stand for other tensors than before; a swap back is none."""
    before, now = _items(variable)
    new = [key for key in now if variable.is_new_item(before.get(key), now[key])]
    return _gone(variable) + new


def _gone(variable: Any) -> list[str]:
    """The names in a dictionary that stand for nothing after the step, or for something only then."""
    before, now = _items(variable)
    return [key for key in (*before, *now) if (key in before) != (key in now)]


def _items(variable: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dictionary before and after the step."""
    before = {key.as_python_constant(): item for key, item in variable.original_items.items()}
    return before, {key.vt.as_python_constant(): item for key, item in variable.items.items()}


@contextlib.contextmanager
def watching_side_effects() -> Iterator[TracedEffects]:
    """While Dynamo traces."""
    effects = TracedEffects()
    mutation, register_hook = SideEffects.mutation, SideEffects.register_hook
    store_attr = SideEffects.store_attr

    def watched_mutation(self: SideEffects, var: Any) -> None:
        effects.note(var)
        name = _name(var)
        if name:
            effects.mutated.add(name)
        if _TENSORS.search(name):
            effects.written.append((var, _line()))
        mutation(self, var)

    def watched_store(
        self: SideEffects, item: Any, name: str, value: Any, *args: Any, **kwargs: Any
    ) -> None:
        effects.note(item)
        if changed := _name(item):
            effects.stored[changed][name] = item, value
        store_attr(self, item, name, value, *args, **kwargs)

    def watched_hook(self: SideEffects, tensor: Any, hook: Any, handle: Any, name: str) -> None:
        effects.hooks.append((name, _line()))
        register_hook(self, tensor, hook, handle, name)

    with (
        patch.object(SideEffects, "mutation", watched_mutation),
        patch.object(SideEffects, "store_attr", watched_store),
        patch.object(SideEffects, "register_hook", watched_hook),
    ):
        yield effects


def _name(variable: Any) -> str:
    """Dynamo's name of an object that was there before the step; none for what is torch's own, such as
    the stack of modes."""
    try:
        return str(variable.source.name) if variable.source is not None else ""
    except NotImplementedError:
        return ""


def _line() -> Source | None:
    """The innermost line of the user's that Dynamo is tracing."""
    for frame in reversed(TracingContext.extract_stack()):
        if is_users(frame.filename):
            return Source(frame.filename, frame.lineno or 0)
    return None
