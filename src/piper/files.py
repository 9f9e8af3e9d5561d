"""Files: a path of the user's in, the module that is made of it out."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

PREFIX = "piper_file_"


def module_of(path: str) -> ModuleType:
    """Import a Python file under a name of its own, so that it hides no module of the same name.

    Its folder is searched for what it imports.
    """
    stem, _ = os.path.splitext(os.path.basename(path))
    name = PREFIX + stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
