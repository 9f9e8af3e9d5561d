"""Updater: one bucket's parameters, or the rank's shard of them, under a `torch.optim` optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.ir.tensor_type import accumulation_dtype
from piper.plan.types import Optimizer
from piper.runtime.factory import make_optimizer, step_of


class Updater:
    """Steps `params` in place. Low-precision parameters have masters of the gradients' dtype, which
    start from what `exact` has for them, else from the parameters."""

    def __init__(
        self, optimizer: Optimizer, params: list[Tensor], exact: list[Tensor | None]
    ) -> None:
        self.masters = [
            torch.nn.Parameter(_master(param, value))
            for param, value in zip(params, exact, strict=True)
        ]
        pairs = zip(params, self.masters, strict=True)
        self.narrow = [(p, m.detach()) for p, m in pairs if p.dtype != m.dtype]
        self.optimizer = make_optimizer(optimizer, self.masters)
        self._step = step_of(self.optimizer)
        # torch 2.11 to 2.13: with foreach, Nesterov's momentum is added into the gradients themselves.
        self.spoils = bool(optimizer.options.get("nesterov"))
        self._before: list[tuple[Tensor, Tensor]] | None = None
        self._state: dict[Any, dict[str, Any]] = {}

    def step(
        self, grads: list[Tensor], divisor: float | Tensor, scale: Tensor | None = None
    ) -> None:
        """One step with the gradients' sums over their count, times `scale`."""
        if isinstance(divisor, float) and divisor != 1.0:
            torch._foreach_div_(grads, divisor)
        elif isinstance(divisor, Tensor):
            for grad in grads:
                grad.div_(divisor)
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self._take(scale)

    def set_options(self, options: Mapping[str, Any]) -> None:
        """From the next step on, take these arguments instead of the plan's."""
        (group,) = self.optimizer.param_groups
        legal = [key for key in self.optimizer.defaults if key in group]
        for key, value in options.items():
            if key not in legal:
                raise RunError(
                    f"{type(self.optimizer).__name__} has no {key!r}", legal=", ".join(legal)
                )
            group[key] = value

    def keep(self) -> None:
        """Remember everything that the next step changes."""
        self._before = [(m.detach(), m.detach().clone()) for m in self.masters]
        self._state = {
            master: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            for master, state in self.optimizer.state.items()
        }

    def settle(self, scale: Tensor) -> None:
        """Step again from what was kept if gradients must be smaller; forget it in any case."""
        assert self._before is not None
        if not float(scale) >= 1.0:  # also where the norm is not a number
            for now, before in self._before:
                now.copy_(before)
            self.optimizer.state.clear()
            self.optimizer.state.update(self._state)
            self._take(scale)
        self._before, self._state = None, {}

    def _take(self, scale: Tensor | None) -> None:
        grads = [master.grad for master in self.masters]
        if scale is not None:
            for grad in grads:
                assert grad is not None
                grad.mul_(scale.to(grad.dtype))
        if self.spoils:
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = None if grad is None else grad.clone()
        self._step()
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        if self.narrow:
            torch._foreach_copy_([p for p, _ in self.narrow], [m for _, m in self.narrow])


def clip_scale(squares: Tensor, divisor: float | Tensor, largest: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `largest`, as torch does."""
    norm = squares.sqrt() / divisor
    return (largest / (norm + 1e-6)).clamp(max=1.0)


def _master(param: Tensor, exact: Tensor | None) -> Tensor:
    """The parameter itself where its dtype is wide enough, else a wide copy."""
    name = str(param.dtype).removeprefix("torch.")
    value = param.detach() if exact is None else exact
    return value.to(param.device, getattr(torch, accumulation_dtype(name)))
