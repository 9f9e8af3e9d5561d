"""Mark: where the reader of one share stands; the state of a loader in, JSON and back out."""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from typing import Any

import msgspec
import torch

from piper.errors import RunError


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """After `samples` of the global stream.

    `epoch` counts epochs of loaders that a share was made of, and `sample` the samples of the present
    one; None where others read. `mixed` are several loaders at a time. `state` is what a loader says
    of itself, encoded.
    """

    samples: int = 0
    epoch: int | None = None
    sample: int = 0
    mixed: bool = False
    state: dict[str, Any] | None = None


def is_stateful(loader: Any) -> bool:
    """Whether it says and takes where it stands, as torchdata's StatefulDataLoader does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def encoded(state: Any) -> dict[str, Any]:
    """A state as JSON: as it is, or as the text of torch's file of it."""
    try:
        copied = msgspec.json.decode(msgspec.json.encode(state))
        if _same(copied, state):
            return {"json": copied}
    except (TypeError, ValueError):
        pass  # it holds what JSON has no word for
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise RunError(
            f"the state_dict() of a loader or scheduler cannot be saved: {str(error).splitlines()[0]}",
            legal="numbers, texts, tensors, and lists, tuples and dictionaries of them",
        ) from None
    return {"torch": base64.b64encode(file.getvalue()).decode()}


def decoded(saved: dict[str, Any]) -> Any:
    """The state that was encoded."""
    if "json" in saved:
        return saved["json"]
    try:
        file = io.BytesIO(base64.b64decode(saved["torch"], validate=True))
        return torch.load(file, weights_only=True)
    except (KeyError, TypeError, binascii.Error, RuntimeError, pickle.PickleError, EOFError):
        raise RunError(
            "the saved state of a loader is damaged", legal="another checkpoint"
        ) from None


def _same(one: Any, other: Any) -> bool:
    """Whether JSON has kept it: also the types, since a tuple comes back as a list."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
