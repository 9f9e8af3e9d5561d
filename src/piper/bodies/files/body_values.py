"""Arguments and constants of a body: Python's values in, JSON out; and back, by type, as data only."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from piper.bodies.chunk_code import constant_data
from piper.errors import PlanError, TraceError

MARK = "$"  # key of the one-entry objects that stand for what JSON lacks
MAX_CONSTANT = 1 << 20  # bytes

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_TABLES: dict[str, dict[str, Any]] = {
    "dtype": DTYPES,
    "device": {kind: torch.device(kind) for kind in ("cpu", "cuda")},
    "layout": {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "jagged": torch.jagged},
    "format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
        "channels_last": torch.channels_last,
        "channels_last_3d": torch.channels_last_3d,
    },
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}


def encode_value(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {MARK: ["node", number[value]]}
    if isinstance(value, float) and not math.isfinite(value):
        return {MARK: ["float", repr(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        parts = [encode_value(part, number) for part in (value.real, value.imag)]
        return {MARK: ["complex", parts]}
    if isinstance(value, tuple):
        return {MARK: ["tuple", [encode_value(item, number) for item in value]]}
    if isinstance(value, list):
        return [encode_value(item, number) for item in value]
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
        return {MARK: ["slice", [encode_value(part, number) for part in parts]]}
    for kind, name in _names(value).items():
        if name in _TABLES[kind]:
            return {MARK: [kind, name]}
    raise TraceError(f"an argument of type {type(value).__name__} cannot be shipped to workers")


def _names(value: Any) -> dict[str, str]:
    """What tables would call a value of torch's."""
    if isinstance(value, torch.device):
        return {"device": value.type}
    kinds = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "format"}
    kind = kinds.get(type(value))
    return {kind: str(value).removeprefix("torch.")} if kind else {}


def decode_value(value: Any, nodes: Sequence[fx.Node]) -> Any:
    """The argument that `encode_value` was given; refuses everything that it does not write."""
    if isinstance(value, list):
        return [decode_value(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    match value if len(value) == 1 else {}:
        case {"$": ["node", int(number)]} if _is_count(number) and number < len(nodes):
            return nodes[number]
        case {"$": ["tuple", [*items]]}:
            return tuple(decode_value(item, nodes) for item in items)
        case {"$": ["slice", [_, _, _] as items]}:
            return slice(*(decode_value(item, nodes) for item in items))
        case {"$": ["complex", [_, _] as items]}:
            real, imaginary = (decode_value(item, nodes) for item in items)
            if _is_number(real) and _is_number(imaginary):
                return complex(real, imaginary)
        case {"$": [str(kind), str(name)]} if name in _TABLES.get(kind, {}):
            return _TABLES[kind][name]
    return refuse(f"an argument is {shortened(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def encode_constant(tensor: torch.Tensor, node: fx.Node) -> list[Any]:
    if tensor.numel() * tensor.element_size() > MAX_CONSTANT:
        raise TraceError(
            f"a tensor constant of {tensor.numel()} elements is part of the code",
            details=[(node.stack_trace or str(node.target)).strip().splitlines()[-1].strip()],
            legal="register it as a buffer of the module",
        )
    dtype, shape, data = constant_data(tensor)
    return [dtype, shape, base64.b64encode(data).decode()]


def decode_constant(data: Any) -> torch.Tensor:
    """The tensor; its bytes must be those of its shape before anything is made."""
    match data:
        case [str(name), [*shape], str(text)] if name in DTYPES and all(map(_is_count, shape)):
            dtype = DTYPES[name]
        case _:
            refuse(f"a constant is {shortened(data)}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        refuse("the bytes of a constant are not base64")
    nonzero = math.prod(dim for dim in shape if dim)
    if len(raw) > MAX_CONSTANT or nonzero > 2**40 or math.prod(shape) * dtype.itemsize != len(raw):
        refuse(f"a constant {name}{shape} has {len(raw)} bytes")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(shape)


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(what: str) -> NoReturn:
    raise PlanError(f"a body is not as Piper writes it: {what}")
