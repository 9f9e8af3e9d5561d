"""lr: a plan's optimizer and a torch scheduler in, what each step's optimizers are set to out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper.errors import RunError
from piper.plan.types import Optimizer
from piper.runtime.factory import make_optimizer, plain


class LearningRate:
    """Runs a scheduler on a stand-in: an optimizer like the plan's, whose one parameter never moves.

    `options` has, for the coming step, every argument that the scheduler ever changed: the learning
    rate, and with some schedulers momenta. Workers are given it before the step.
    """

    def __init__(
        self, optimizer: Optimizer, lr_schedule: Callable[[torch.optim.Optimizer], LRScheduler]
    ) -> None:
        self._optimizer = make_optimizer(optimizer, [nn.Parameter(torch.zeros(2, 2))])
        self._group = self._optimizer.param_groups[0]
        self._initial = {key: plain(self._group[key]) for key in self._optimizer.defaults}
        self._changed: set[str] = {"lr"}
        self.scheduler = lr_schedule(self._optimizer)
        if not isinstance(self.scheduler, LRScheduler):
            raise RunError(
                f"lr_schedule made {self.scheduler!r}",
                legal="a scheduler of torch.optim.lr_scheduler, made with the optimizer it is given",
            )

    @property
    def options(self) -> dict[str, Any]:
        """What optimizers have in the coming step."""
        now = {key: plain(self._group[key]) for key in self._initial}
        self._changed |= {key for key, value in now.items() if value != self._initial[key]}
        return {key: value for key, value in now.items() if key in self._changed}

    @property
    def lr(self) -> float:
        """The learning rate of the coming step."""
        return float(self._group["lr"])

    def advance(self, loss: float | None = None) -> None:
        """After a step: on to the next one's. A scheduler that looks at the loss is given it."""
        _ = self.options  # note what this step had, before it changes back
        self._optimizer.step()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if loss is None:
                raise RunError(
                    "ReduceLROnPlateau looks at the loss, which advance was not given",
                    legal="advance(loss)",
                )
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands."""
        group = {key: self._group[key] for key in self._group if key != "params"}
        return {"scheduler": self.scheduler.state_dict(), "group": group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._group.update(state["group"])
        self.scheduler.load_state_dict(state["scheduler"])
