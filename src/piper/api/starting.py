"""Starting weights: what a user gave as weights and a traced model in, what its runs start from out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from piper.compiler.source import Source
from piper.errors import Call, FileError, PiperError, WeightsError, user_source
from piper.frontend.hf_weights import converted, is_pretrained, unneeded_names
from piper.runtime.state.read_pieces import PieceReader
from piper.runtime.state.weight_sources import weight_source
from piper.stored.matching import match
from piper.stored.stored_pieces import StoredState

if TYPE_CHECKING:
    from torch import Tensor

Starting = tuple[StoredState, Mapping[str, "Tensor"]]


def starting_weights(source: Source, weights: Any, *, strict: bool) -> Starting:
    """The index of what the model's tensors are, and those in memory. Names that do not fit are one
    error, or a warning."""
    given = os.fspath(weights) if isinstance(weights, str | os.PathLike) else "state_dict"
    try:
        return _start(source, weights, given, strict=strict)
    except (FileError, WeightsError) as error:
        raise _at_call(error, given) from None


def _start(source: Source, weights: Any, given: str, *, strict: bool) -> Starting:
    found = weight_source(weights)
    stored, names, unneeded = found.stored, source.state_names, []
    if is_pretrained(source.model):
        unneeded = unneeded_names(source.model)
        shapes = {name: source.tensors[tensor].type.shape for name, tensor in names.items()}
        if {name: tensor.shape for name, tensor in stored.items()} != shapes:
            stored = converted(source.model, stored)
    types = {name: tensor.type for name, tensor in source.tensors.items()}
    matched = match(stored, names, types, strict=strict, unneeded=unneeded)
    reader = PieceReader(stored, found.memory)
    untied = [
        f"{one}, {other}" for one, other in matched.doubled.items() if not reader.equal(one, other)
    ]
    if untied and strict:
        raise WeightsError(
            "the weights have several values for one tensor of the model, whose names are tied",
            details=untied,
            legal="a model that does not tie them, or strict=False: the last one counts",
        )
    left = "; ".join([*matched.left(), *(f"the last of {names}, which differ" for names in untied)])
    if left:
        warnings.warn(f"weights of {given}: {left}", stacklevel=6)  # of lower, which is wrapped
    return StoredState(matched.model), found.memory


def _at_call(error: PiperError, given: str) -> PiperError:
    """The same error with the user's own line."""
    call = Call(f"weights of {given}", user_source())
    return type(error)(error.message, call=call, details=error.details, legal=error.legal)
