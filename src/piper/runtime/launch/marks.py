"""Mark: where the reader of one share stands; the state of a loader in, JSON and back out."""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from typing import Any

import msgspec
import numpy as np
import torch

from piper.errors import RunError

_LEGAL = "numbers, texts, tensors, arrays of numpy, and lists, tuples and dictionaries of them"
_NUMPY: list[Any] = [  # what pickles of numpy's numbers and arrays call
    np.ndarray,
    np.dtype,
    *{getattr(np.dtypes, name) for name in np.dtypes.__all__},
    np.float64(0).__reduce__()[0],
    np.empty(0).__reduce__()[0],
]


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
    data = _saved(state)
    if data is None:
        raise RunError(
            f"the state_dict() of a loader or scheduler cannot be saved: {_unsaved(state)}",
            legal=_LEGAL,
        )
    return {"torch": base64.b64encode(data).decode()}


def decoded(saved: dict[str, Any]) -> Any:
    """The state that was encoded."""
    if "json" in saved:
        return saved["json"]
    try:
        file = io.BytesIO(base64.b64decode(saved["torch"], validate=True))
        return _loaded(file)
    except (KeyError, TypeError, binascii.Error, RuntimeError, pickle.PickleError, EOFError):
        raise RunError(
            "the saved state of a loader is damaged", legal="another checkpoint"
        ) from None


def _saved(state: Any) -> bytes | None:
    """Torch's file of it, if that can be read again."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        _loaded(file)
    except (pickle.PickleError, AttributeError, TypeError):
        return None
    return file.getvalue()


def _loaded(file: io.BytesIO) -> Any:
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(file, weights_only=True)


def _unsaved(state: Any, at: str = "it") -> str:
    """The first entry that cannot be saved by itself: where it is, and what."""
    entries: Any = ()
    if isinstance(state, dict):
        entries = state.items()
    elif isinstance(state, list | tuple):
        entries = enumerate(state)
    for key, value in entries:
        if _saved(value) is None:
            return _unsaved(value, f"[{key!r}]" if at == "it" else f"{at}[{key!r}]")
    return f"{at} is a {type(state).__qualname__}"


def _same(one: Any, other: Any) -> bool:
    """Whether JSON has kept it: also the types, since a tuple comes back as a list."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
