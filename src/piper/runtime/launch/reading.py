"""Reading: a data function in, its file and name for other processes and back out."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from piper.errors import Call, RunError, Source, user_source
from piper.files import PREFIX, module_of
from piper.runtime.launch.shares import Share

Data = Callable[[Share], Iterable[Any]]
_importing: list[str] = []  # the files that this process is importing for its rank
_LEGAL = (
    "a function at the top level of a file, def data(share): ..., or an iterable of global batches"
)


def reference(function: Data) -> dict[str, Any]:
    """Where other processes find a function: its file and its name."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if not inspect.isfunction(function) or "." in name or "<" in name:
        what = "a lambda" if "<lambda>" in name else name
        raise RunError(f"worker processes cannot import the data function {what}", legal=_LEGAL)
    file = inspect.getsourcefile(function)
    if file is None or not os.path.isfile(file):
        raise RunError(f"worker processes cannot import {name}: it is in no file", legal=_LEGAL)
    return {**module_reference(function.__module__, file), "name": name}


def module_reference(module: str, file: str) -> dict[str, Any]:
    """Where other processes find a module."""
    path = [os.path.abspath(folder) for folder in sys.path]
    return {"module": module, "file": os.path.abspath(file), "path": path}


def place_of(data: Any) -> str:
    """What the user calls some data: a function's name and line, or the kind of a thing."""
    if not inspect.isfunction(data):
        return f"the {type(data).__name__}"
    return f"{data.__name__} ({Source(data.__code__.co_filename, data.__code__.co_firstlineno)})"


def function_of(found: Mapping[str, Any]) -> Data:
    """The function that a reference names."""
    function = getattr(import_reference(found), found["name"], None)
    if not callable(function):
        raise RunError(f"{found['file']} has no {found['name']} once it is imported", legal=_LEGAL)
    return function


def import_reference(found: Mapping[str, Any]) -> ModuleType:
    """The module that a reference names. A script is imported: its main part does not run."""
    sys.path.extend(folder for folder in found["path"] if folder not in sys.path)
    module, before = found["module"], _importing[:]
    _importing.append(found["file"])
    try:
        if module == "__main__" or module.startswith(PREFIX):
            return module_of(found["file"])
        return importlib.import_module(module)
    finally:
        _importing[:] = before


def refuse_launch_while_importing() -> None:
    """Raise where a file that a rank imports would launch ranks itself, and those more, without end."""
    if _importing:
        raise RunError(
            "a rank imports this file for its data, and the file would launch ranks again",
            call=Call("launch", user_source()),
            legal='the part that launches under if __name__ == "__main__":, which ranks do not run',
        )
