"""Custom operators: the bodies of a plan in, the modules of this process that register them out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_CALL = re.compile(r'"([A-Za-z_]\w*)\.(\w+)\.\w+"', re.ASCII)
_EVERYWHERE = {"aten", "prims", "piper", "prim"}


def registering_modules(bodies: Iterable[str]) -> list[ModuleType]:
    """What other processes must import to have the operators that these bodies call.

    An operator of a library that no Python code of the process registers (a shared object's) has none.
    """
    called = {
        f"{library}::{name}"
        for text in bodies
        for library, name in _CALL.findall(text)
        if library not in _EVERYWHERE
    }
    if not called:
        return []
    files = {getattr(module, "__file__", None): module for module in list(sys.modules.values())}
    found = (_module_of(operator) or files.get(_file_of(operator)) for operator in sorted(called))
    return list({module.__name__: module for module in found if module}.values())


def _module_of(operator: str) -> ModuleType | None:
    """Of an operator that `torch.library.custom_op` or `triton_op` made."""
    from torch._library.custom_ops import OPDEFS

    definition: Any = OPDEFS.get(operator)
    return None if definition is None else sys.modules.get(definition._init_fn.__module__)


def _file_of(operator: str) -> str | None:
    """Of one that `torch.library.define` made: where its fake kernel was registered."""
    from torch._library.simple_registry import singleton

    kernel = singleton.find(operator).fake_impl.kernel
    return None if kernel is None else str(kernel.source).rpartition(":")[0]
