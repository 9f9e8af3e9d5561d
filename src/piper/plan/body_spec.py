"""What the compiler knows of a body without running it: its hash, its inputs and its outputs."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from piper.ir.tensor_type import TensorType
from piper.plan.body_moments import Moments

RefKind = Literal["input", "output", "saved", "kept", "tangent", "grad"]


class Ref(msgspec.Struct, frozen=True):
    """One tensor of a chunk, as its bodies name it.

    `input` i and `output` i are the chunk's own; `saved` i is kept from forward to backward, `kept` i
    from BI to BW; `tangent` i is the gradient of output i; `grad` i the gradient of input i.
    """

    kind: RefKind
    index: int


class BodySpec(msgspec.Struct, frozen=True):
    """One body: content hash of its code, and what each argument and result stands for.

    `inside` says how its memory passes while it runs, `products` which results are products of matrices.
    """

    hash: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    flops: float
    inside: Moments = ()
    products: tuple[int, ...] = ()


class ChunkBodies(msgspec.Struct, frozen=True):
    """The bodies of one chunk by phase; a phase that has nothing to do has none. `S` gives buffers, its
    inputs and results, their next content.

    `kept` are the Values that BI gives to BW.
    """

    by_phase: dict[str, BodySpec]
    saved: tuple[TensorType, ...]
    kept: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    grads: dict[int, TensorType]


def content_hash(text: str) -> str:
    """The name of a body: a hash of its text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
