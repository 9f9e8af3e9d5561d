"""Updater: one bucket's parameters, or the rank's shard of them, under `torch.optim` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piper.errors import RunError
from piper.plan.optimizers import state_pieces
from piper.plan.types import ParamGroup
from piper.runtime.torch_optimizers import make_optimizer, step_of


class Piece(NamedTuple):
    """What one parameter group steps of a tensor: elements `begin` to `end`."""

    group: int
    place: int  # of the tensor
    begin: int
    end: int


class Updater:
    """Steps `params` in place, piece by piece. Where `master` is another dtype than theirs there are
    masters, which start from what `exact` has for them, else from the parameters. What optimizers keep
    is in `state` between steps, and in the masters' dtype within one."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        params: list[Tensor],
        exact: list[Tensor | None],
        pieces: Sequence[Piece],
        *,
        master: torch.dtype | None = None,
        state: torch.dtype | None = None,
    ) -> None:
        self.masters = [_master(p, value, master) for p, value in zip(params, exact, strict=True)]
        pairs = zip(params, self.masters, strict=True)
        self.narrow = [(p, m) for p, m in pairs if p.dtype != m.dtype]
        self.pieces = list(pieces)
        self.stepped = [torch.nn.Parameter(_part(self.masters[p.place], p)) for p in self.pieces]
        self.optimizers: dict[int, torch.optim.Optimizer] = {}  # per parameter group
        for number in sorted({piece.group for piece in pieces}):
            mine = [s for s, p in zip(self.stepped, pieces, strict=True) if p.group == number]
            self.optimizers[number] = make_optimizer(groups[number], mine)
        self._kept_in = None if state == self.masters[0].dtype else state
        self._numbers = {number: _numbers(groups[number]) for number in self.optimizers}
        self._steps = [step_of(optimizer) for optimizer in self.optimizers.values()]
        # torch 2.11 to 2.13: with foreach, Nesterov's momentum is added into the gradients themselves.
        self.spoils = any(groups[number].options.get("nesterov") for number in self.optimizers)
        self.averages: list[Tensor] = []
        self.ema: float | None = None
        self.taken = 0  # steps, all of them
        self._begun = False
        self._before: list[tuple[Tensor, Tensor]] | None = None
        self._state: list[dict[Any, dict[str, Any]]] = []
        self._grads: list[Tensor] = []

    def grads_of(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients of all pieces, given those of `params`."""
        return [_part(grads[piece.place], piece) for piece in self.pieces]

    def step(
        self, grads: list[Tensor], divisor: float | Tensor, scale: Tensor | None = None
    ) -> None:
        """One step with the pieces' gradients: sums over their count, times `scale`."""
        if isinstance(divisor, float) and divisor != 1.0:
            torch._foreach_div_(grads, divisor)
        elif isinstance(divisor, Tensor):
            _change(Tensor.div_, grads, divisor)
        self._grads = grads
        self._take(scale)
        if self._before is None:
            self._grads = []  # their memory may be wanted for other things

    def keep_averages(self, ema: float) -> None:
        """Have `average` keep moving averages of the masters."""
        self.ema, self.averages = ema, [master.clone() for master in self.masters]

    def average(self) -> None:
        """After a step: as torch.optim.swa_utils.AveragedModel does; the first one is copied."""
        self.taken += 1
        if self.ema is None:
            return
        if self._begun:
            torch._foreach_lerp_(self.averages, self.masters, 1 - self.ema)
        else:
            torch._foreach_copy_(self.averages, self.masters)
        self._begun = True

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """From the next step on, each parameter group takes these arguments instead of the plan's."""
        for number, optimizer in self.optimizers.items():
            (group,) = optimizer.param_groups
            legal = [key for key in optimizer.defaults if key in group]
            for key, value in options[number].items():
                if key not in legal:
                    raise RunError(
                        f"{type(optimizer).__name__} has no {key!r}", legal=", ".join(legal)
                    )
                group[key] = value

    def state_at(self, place: int, element: int) -> tuple[dict[str, Any], int]:
        """What is kept beside an element of a tensor, and where its piece begins."""
        for piece, param in zip(self.pieces, self.stepped, strict=True):
            if piece.place == place and piece.begin <= element < piece.end:
                return self.optimizers[piece.group].state.get(param, {}), piece.begin
        raise RunError(f"nobody steps element {element}")

    @property
    def unsettled(self) -> bool:
        """Whether a step may yet be taken again."""
        return self._before is not None

    def restore(
        self, states: Sequence[Mapping[str, Tensor]], averages: Sequence[Tensor], steps: int
    ) -> None:
        """Go on after so many steps: what was kept for each piece, and the moving averages."""
        self.taken = steps
        for number, optimizer in self.optimizers.items():
            mine = [s for s, p in zip(states, self.pieces, strict=True) if p.group == number]
            groups = optimizer.state_dict()["param_groups"]
            state = {index: dict(kept) for index, kept in enumerate(mine) if kept}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            for param, kept in zip(optimizer.param_groups[0]["params"], mine, strict=True):
                for key, value in kept.items():  # torch takes numbers to the parameters' dtype
                    now = optimizer.state[param][key]
                    if now.dtype != value.dtype and not value.dim():
                        optimizer.state[param][key] = value.to(now.device)
        self._cast_state(self._kept_in)
        for now, average in zip(self.averages, averages, strict=True):
            now.copy_(average)
        self._begun = True

    def keep(self) -> None:
        """Remember everything that the next step changes."""
        self._before = [(m, m.clone()) for m in self.masters]
        self._state = [
            {
                param: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
                for param, state in optimizer.state.items()
            }
            for optimizer in self.optimizers.values()
        ]

    def settle(self, scale: Tensor) -> None:
        """Step again from what was kept if gradients must be smaller; forget it in any case."""
        if not float(scale) >= 1.0:  # also where the norm is not a number
            self._roll_back()
            self._take(scale)
        self._before, self._state, self._grads = None, [], []

    def undo(self) -> None:
        """Have everything as it was kept."""
        self._roll_back()
        if self.narrow:
            torch._foreach_copy_([p for p, _ in self.narrow], [m for _, m in self.narrow])
        self._before, self._state, self._grads = None, [], []

    def _roll_back(self) -> None:
        assert self._before is not None
        for now, before in self._before:
            now.copy_(before)
        for optimizer, state in zip(self.optimizers.values(), self._state, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)

    def _take(self, scale: Tensor | None) -> None:
        if scale is not None:
            _change(Tensor.mul_, self._grads, scale)
        for param, grad in zip(self.stepped, self._grads, strict=True):
            param.grad = grad.to(param.dtype, copy=self.spoils)
        if self._kept_in is not None:
            self._cast_state(self.masters[0].dtype)
        for step in self._steps:
            step()
        self._cast_state(self._kept_in)
        for param in self.stepped:
            param.grad = None
        if self.narrow:
            torch._foreach_copy_([p for p, _ in self.narrow], [m for _, m in self.narrow])

    def _cast_state(self, dtype: torch.dtype | None) -> None:
        """What optimizers keep for elements in another dtype; with None, as it is."""
        for number, optimizer in self.optimizers.items() if dtype is not None else ():
            for kept in optimizer.state.values():
                for name, value in kept.items():
                    if isinstance(value, Tensor) and name not in self._numbers[number]:
                        kept[name] = value.to(dtype)


def _numbers(group: ParamGroup) -> frozenset[str]:
    """What an optimizer keeps that is one number for a parameter, such as its steps."""
    return frozenset(name for name, form in state_pieces(group, ()) if form == "number")


def clip_scale(squares: Tensor, divisor: float | Tensor, largest: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `largest`, as torch does."""
    norm = squares.sqrt() / divisor
    return (largest / (norm + 1e-6)).clamp(max=1.0)


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    """Of a piece's tensor, its elements; a whole tensor keeps its shape."""
    if (piece.begin, piece.end) == (0, tensor.numel()):
        return tensor
    return tensor.view(-1)[piece.begin : piece.end]


def _change(
    change: Callable[[Tensor, Tensor], Tensor], grads: Sequence[Tensor], number: Tensor
) -> None:
    """Divide or multiply gradients by a number, which is not rounded to a dtype of few bits before."""
    for grad in grads:
        if grad.element_size() < 4:
            grad.copy_(change(grad.float(), number.float()))
        else:
            change(grad, number.to(grad.dtype))


def _master(param: Tensor, exact: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The parameter itself where it has the dtype, else a copy."""
    if dtype is None or param.dtype == dtype:
        return param.detach()
    value = param.detach() if exact is None else exact
    return value.to(param.device, dtype)
