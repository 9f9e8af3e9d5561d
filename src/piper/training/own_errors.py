"""What a model raises on one device, outside of any plan, in; one error with its line out."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from piper.bodies.failed_node import reason_of
from piper.errors import PiperError, RunError, Source

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@contextlib.contextmanager
def own_errors(dtype: str) -> Iterator[None]:
    """While the reference runs, maybe in a wider dtype than the model was written for."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        stack = traceback.extract_tb(error.__traceback__)
        frames = [
            f for f in stack if "/torch/" not in f.filename and not f.filename.startswith(_OURS)
        ]
        if not frames:
            raise
        place = Source(frames[-1].filename, frames[-1].lineno or 0)
        raise RunError(
            f"the model does not run on one device in {dtype} at {place}: {reason_of(error)}",
            details=[(frames[-1].line or "").strip()],
            legal=f"code that runs in {dtype}: with dtype=x.dtype where it makes tensors",
        ) from error
