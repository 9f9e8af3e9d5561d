"""Weights: what the model's tensors hold before the first step, made by their code or from files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from urllib.parse import unquote

import torch
from torch import Tensor

from piper.bodies.files.codec import load
from piper.errors import RunError
from piper.plan.holdings import Holding
from piper.plan.types import ModelTensor, Plan
from piper.runtime.state.given import NOTHING, Given
from piper.runtime.state.patch_views import patch_view
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.boxes import patches_in
from piper.stored.stored_pieces import StoredState


class Weights:
    """Values of a plan's tensors: those that are stored or that a rank was given, else the initial ones
    by the plan's seed."""

    def __init__(
        self,
        plan: Plan,
        bodies: Mapping[str, str],
        stored: StoredState | None = None,
        memory: Mapping[str, Tensor] | None = None,
        given: Given | None = None,
    ) -> None:
        self.plan = plan
        self.bodies = bodies
        self.given = given or NOTHING
        self.reader = PieceReader(stored.model if stored else {}, memory)

    def of(self, plan: Plan, bodies: Mapping[str, str], given: Given | None) -> Weights:
        """The same for another plan of the same model."""
        more = given.elements if given else {}
        names, elements = self.given
        other = Weights(plan, bodies, given=Given(names, {**elements, **more}))
        other.reader = self.reader
        return other

    def elements(self, held: Holding) -> Tensor:
        """Those of a holding, one after the other."""
        name = unquote(held.tensor)
        if name in self.given.names:
            return self._given(held.key)
        if name in self.reader.stored:
            return self.reader.elements(name, held.part, held.first, held.last)
        return elements_of(self._made(held.tensor), held)

    def whole(self, name: str) -> Tensor:
        """All of a tensor, for those that no step uses."""
        own = unquote(name)
        if own in self.given.names:
            return self._given(name).view(self.plan.tensors[name].shape)
        return self.reader.tensor(own) if own in self.reader.stored else self._made(name)

    def as_held(self, name: str) -> Tensor:
        """The same in the dtype that a rank would hold it in."""
        return self.whole(name).to(getattr(torch, self.plan.tensors[name].dtype))

    def _given(self, key: str) -> Tensor:
        if key not in self.given.elements:
            raise RunError(
                f"{unquote(key)} lies in the driver's memory, which has not sent it here"
            )
        return self.given.elements[key]

    def _made(self, name: str) -> Tensor:
        return initial_value(self.plan.tensors[name], self.bodies, seed=self.plan.seed)


def initial_value(tensor: ModelTensor, bodies: Mapping[str, str], *, seed: int) -> Tensor:
    """The whole tensor, on the CPU."""
    seeds = [_seed(seed, key) for key in tensor.keys]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        (value,) = load(bodies[tensor.init])(seeds)
    value = value.resolve_conj().resolve_neg()
    return value.clone(memory_format=torch.contiguous_format)


def elements_of(whole: Tensor, held: Holding) -> Tensor:
    """The elements of a holding, one after the other, out of the whole tensor."""
    flat = torch.empty(held.last - held.first, dtype=whole.dtype)
    for patch in patches_in(held.part, held.first, held.last):
        patch_view(flat, patch).copy_(whole[patch.box.slices])
    return flat


def _seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:7], "little")
