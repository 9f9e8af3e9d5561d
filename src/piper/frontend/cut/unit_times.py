"""Unit times: a Capture in; the seconds that its units take here, forward and backward, out.

A unit runs alone, on made-up tensors of the captured shapes. Units of equal code and shapes run once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from piper.bodies.casts import CASTS, CapturedRun
from piper.bodies.leaves import tensors_in
from piper.frontend.capture.capture import Capture, value_of
from piper.frontend.cut.units import Unit

LEAST_RUNS, MOST_RUNS = 7, 100
ENOUGH = 0.02  # seconds that a unit is run for, within these numbers


def unit_times(
    capture: Capture,
    nodes: Sequence[fx.Node],
    units: Sequence[Unit],
    estimated: Sequence[float],
    *,
    device: str,
) -> list[float]:
    """What each unit takes. One that cannot run alone takes its estimate, as far off as the others'
    are on average."""
    timing = _Timing(capture, device)
    measured = [timing.seconds(unit, nodes[unit.start : unit.stop]) for unit in units]
    guesses = [sum(estimated[unit.start : unit.stop]) for unit in units]
    known = [(m, g) for m, g in zip(measured, guesses, strict=True) if m is not None]
    guessed = sum(guess for _, guess in known)
    factor = sum(m for m, _ in known) / guessed if guessed else 1.0
    return [g * factor if m is None else m for m, g in zip(measured, guesses, strict=True)]


class _Timing:
    def __init__(self, capture: Capture, device: str) -> None:
        self.capture = capture
        self.device = device
        self.root = torch.nn.Module()
        for name, constant in capture.constants.items():
            self.root.register_buffer(name, _made_up(constant, device))
        self.known: dict[str, float | None] = {}

    def seconds(self, unit: Unit, nodes: Sequence[fx.Node]) -> float | None:
        inputs = list(
            dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in set(nodes))
        )
        key = self._key(nodes, inputs)
        if key not in self.known:
            try:
                self.known[key] = self._timed(self._step(nodes, inputs))
            except Exception as error:  # operators may refuse anything; the cut goes on without it
                line = str(error).partition("\n")[0]
                warnings.warn(
                    f"cut: {unit.path} cannot be measured alone, so its cost is estimated: {line}",
                    stacklevel=2,
                )
                self.known[key] = None
        return self.known[key]

    def _step(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> Callable[[], None]:
        """The forward and the backward of some code."""
        facts, inside = self.capture.facts, set(nodes)
        changed = frozenset().union(*(facts.changes.get(node, ()) for node in nodes))
        given = {node: _made_up(value_of(node), self.device) for node in inputs}
        leaves = []
        for node, value in given.items():
            if node in facts.flowing and isinstance(value, Tensor):
                leaves.append(value.requires_grad_())
        results = [n for n in nodes if n in facts.flowing and not set(n.users) <= inside]
        run = self._code(nodes, inputs, results)

        def step() -> None:
            made = run(*(_copied(v) if facts.memory[n] & changed else v for n, v in given.items()))
            ends = [tensor for tensor in tensors_in(made) if tensor.requires_grad]
            if ends and leaves:
                torch.autograd.grad(
                    ends, leaves, list(map(torch.ones_like, ends)), allow_unused=True
                )

        return step

    def _code(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> Callable[..., Any]:
        """A function of the inputs. Only casts take an interpreter, which has a time of its own."""
        graph, new = fx.Graph(), {}
        for node in inputs:
            new[node] = graph.placeholder(node.name)
        for node in nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].args = fx.node.map_aggregate(new[node].args, self._here)
            new[node].kwargs = fx.node.map_aggregate(new[node].kwargs, self._here)
        graph.output([new[node] for node in results])
        if any(CASTS in node.meta for node in nodes):
            return CapturedRun(self.root, graph=graph).run
        return fx.GraphModule(self.root, graph)

    def _here(self, argument: Any) -> Any:
        return torch.device(self.device) if isinstance(argument, torch.device) else argument

    def _timed(self, step: Callable[[], None]) -> float:
        with torch.enable_grad(), torch.device(self.device):
            step()
            found: list[float] = []
            while len(found) < LEAST_RUNS or (sum(found) < ENOUGH and len(found) < MOST_RUNS):
                begin = time.perf_counter()
                step()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - begin)
        return median(found)

    def _key(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> str:
        """Equal for equal code on inputs of equal types, of which the same has a gradient."""
        names: dict[fx.Node, Any] = {node: f"#{i}" for i, node in enumerate((*inputs, *nodes))}
        flowing, inside = self.capture.facts.flowing, set(nodes)
        words = [f"{_type(value_of(node))} {node in flowing}" for node in inputs]
        for node in nodes:
            args = fx.map_arg((node.args, node.kwargs), names.__getitem__)
            casts = node.meta.get(CASTS)
            ends = node in flowing and not set(node.users) <= inside
            words.append(f"{node.op} {node.target} {args} {casts and casts.devices} {ends}")
        return "\n".join(words)


def _made_up(value: Any, device: str) -> Any:
    """Real tensors for fake ones: numbers around 0; where they are indices, 0 is always one."""
    if isinstance(value, list | tuple):
        return type(value)(_made_up(each, device) for each in value)
    if not isinstance(value, Tensor):
        return value
    made = torch.zeros(tuple(map(int, value.shape)), dtype=value.dtype, device=device)
    if value.is_floating_point():
        made.normal_()
    return made if value.dtype != torch.bool else made.logical_not_()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _type(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
