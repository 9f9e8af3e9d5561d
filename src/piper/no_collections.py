"""no_collections: a block that makes many objects and no cycles runs without a search for cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Passes and simulations make many small objects and no cycles, as imports do; looking for some
    would double their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                # All that is alive counts as old now: else the next object made would have it searched.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
