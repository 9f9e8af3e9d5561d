"""Views of patches: elements in a row in; those that are a box of a tensor, in its shape, out."""

from __future__ import annotations

import math

from torch import Tensor

from piper.stored.boxes import Patch


def patch_view(elements: Tensor, patch: Patch) -> Tensor:
    """The elements of a patch, among those of a range that lie one after the other."""
    run = elements[patch.offset : patch.offset + math.prod(patch.run)]
    return run.view(patch.run)[patch.inside.slices]
