"""lr: a plan's parameter groups and a torch scheduler in, what each step's groups are set to out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper.errors import RunError
from piper.plan.types import ParamGroup
from piper.runtime.torch_optimizers import plain, small_parameter

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


_LEGAL = "lr_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)"


def check_schedule(lr_schedule: Any) -> None:
    """Raise unless it is a function that makes a scheduler, of an optimizer alone."""
    if lr_schedule is None:
        return
    if not callable(lr_schedule):
        kind = type(lr_schedule).__name__
        what = f"a {kind} of an optimizer that nobody steps"
        if not isinstance(lr_schedule, LRScheduler):
            what = repr(lr_schedule)
        raise RunError(f"lr_schedule is {what}", legal=_LEGAL)
    try:
        signature = inspect.signature(lr_schedule)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(lr_schedule, "__name__", "lr_schedule")
        raise RunError(
            f"lr_schedule is called with an optimizer alone, and {name} is {error}", legal=_LEGAL
        ) from None


class LearningRate:
    """Runs a scheduler on a stand-in: an optimizer like the plan's, with one parameter a group, which
    never moves; or on several, where the plan has several optimizers.

    `options` has, for the coming step and each parameter group, every argument that a scheduler ever
    changed: the learning rate, and with some schedulers momenta. Workers are given it before the step.
    """

    def __init__(self, groups: Sequence[ParamGroup], lr_schedule: MakeScheduler) -> None:
        self._optimizers = [_stand_in(list(g)) for _, g in groupby(groups, lambda g: g.number)]
        self._initial = [{k: plain(g[k]) for k in known} for g, known in self._groups]
        self._changed: list[set[str]] = [{"lr"} for _ in groups]
        self.schedulers = [lr_schedule(optimizer) for optimizer in self._optimizers]
        for scheduler in self.schedulers:
            if not isinstance(scheduler, LRScheduler):
                raise RunError(f"lr_schedule made {scheduler!r}", legal=_LEGAL)

    @property
    def _groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """All groups, each with the arguments that it has."""
        return [(group, o.defaults) for o in self._optimizers for group in o.param_groups]

    @property
    def options(self) -> list[dict[str, Any]]:
        """What parameter groups have in the coming step."""
        found = []
        for (group, _), initial, changed in zip(
            self._groups, self._initial, self._changed, strict=True
        ):
            now = {key: plain(group[key]) for key in initial}
            changed |= {key for key, value in now.items() if value != initial[key]}
            found.append({key: value for key, value in now.items() if key in changed})
        return found

    @property
    def waits(self) -> bool:
        """Whether what comes next is known from the loss of the step before alone."""
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.schedulers)

    @property
    def lr(self) -> float:
        """The learning rate of the coming step, of the first group."""
        return float(self._groups[0][0]["lr"])

    def advance(self, loss: float | None = None) -> None:
        """After a step: on to the next one's. A scheduler that looks at the loss is given it."""
        _ = self.options  # note what this step had, before it changes back
        for optimizer, scheduler in zip(self._optimizers, self.schedulers, strict=True):
            optimizer.step()
            if isinstance(scheduler, ReduceLROnPlateau):
                if loss is None:
                    raise RunError(
                        "ReduceLROnPlateau looks at the losses of all steps, and those before this "
                        "training are not known",
                        legal="a checkpoint that piper.train saved, or another schedule",
                    )
                scheduler.step(loss)
            else:
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group, _ in self._groups]
        changed = [sorted(keys) for keys in self._changed]
        schedulers = [scheduler.state_dict() for scheduler in self.schedulers]
        return {
            "kinds": [_kind(scheduler) for scheduler in self.schedulers],
            "schedulers": schedulers,
            "groups": groups,
            "changed": changed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kinds = [_kind(scheduler) for scheduler in self.schedulers]
        saved_kinds = state.get("kinds", kinds)  # older checkpoints do not say
        if saved_kinds != kinds:
            raise RunError(
                f"the schedule that was saved is {', '.join(saved_kinds)}, not {', '.join(kinds)}",
                legal="that schedule; or weights=DIR (--weights DIR), to start anew from the model",
            )
        for (group, _), saved in zip(self._groups, state["groups"], strict=True):
            group.update(saved)
        for known, keys in zip(self._changed, state["changed"], strict=True):
            known.update(keys)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


def _kind(scheduler: LRScheduler) -> str:
    """Its class, with those of the schedulers that it is made of."""
    parts = [_kind(one) for one in getattr(scheduler, "_schedulers", ())]
    name = type(scheduler).__name__
    return f"{name}({', '.join(parts)})" if parts else name


def _stand_in(groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
    """An optimizer with these groups; arguments that all have in common are its defaults."""
    first = groups[0].options
    common = {k: v for k, v in first.items() if all(g.options.get(k) == v for g in groups)}
    rows = [
        {"params": [small_parameter()], **({"name": g.label} if g.label else {}), **g.options}
        for g in groups
    ]
    made: torch.optim.Optimizer = getattr(torch.optim, groups[0].optimizer)(rows, **common)
    return made
