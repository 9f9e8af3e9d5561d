"""verify: a job against the user's own module on one device, in eager autograd with torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from piper.api.job import Job
from piper.api.run import Run
from piper.bodies.flex_math import flex_on_cpu, uncompiled
from piper.bodies.leaves import map_leaves
from piper.errors import RunError
from piper.frontend.capture.capture import plain_name
from piper.frontend.capture.hf_experts import own_experts
from piper.frontend.capture.step_results import loss_and_metrics
from piper.plan.types import Plan
from piper.runtime.factory import optimizers_of
from piper.runtime.worker.weights import Weights
from piper.training.keyed_reference import eager_step
from piper.training.own_errors import own_errors

LOSS_BOUND = GRADIENT_BOUND = 1e-10
PARAMETER_BOUND = 1e-8

What = Literal["loss", "gradient", "parameter"]
Key = tuple[What, str]  # a number or a tensor that training gave, by its name and step


@dataclass(frozen=True)
class Trained:
    """What training gave: a loss per step, the gradients of each step, the final parameters, and with
    them the buffers that forwards have changed."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]

    def tensors(self) -> dict[Key, Tensor]:
        """All of it by name."""
        found: dict[Key, Tensor] = {}
        for step, (loss, gradients) in enumerate(zip(self.losses, self.gradients, strict=True)):
            found["loss", f"step {step}"] = torch.tensor(loss, dtype=torch.float64)
            found |= {("gradient", f"{n} in step {step}"): g for n, g in gradients.items()}
        return found | {("parameter", name): value for name, value in self.parameters.items()}


@dataclass(frozen=True)
class Bounds:
    """The largest relative errors. Those of float64 are law 1."""

    loss: float = LOSS_BOUND
    gradient: float = GRADIENT_BOUND
    parameter: float = PARAMETER_BOUND


@dataclass(frozen=True)
class Rounded:
    """A tensor with an error above its bound that rounding explains.

    `vanishing` elements have no more than rounding in them. The error of all others is within the bound,
    unless `explained` says how large rounding may make it. All errors are relative to the reference.
    """

    what: What
    name: str
    error: float
    vanishing: int
    elements: int
    explained: float | None


@dataclass
class Errors:
    """The largest relative errors, each with the tensor and step where it was found.

    What rounding explains stands in `rounded` instead.
    """

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    differing_replicas: list[str] = field(default_factory=list)
    worst: dict[str, str] = field(default_factory=dict)
    rounded: list[Rounded] = field(default_factory=list)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def exact(self) -> bool:
        """Whether all is within its bound, and replicas are bit-equal."""
        return (
            self.loss <= self.bounds.loss
            and self.gradient <= self.bounds.gradient
            and self.parameter <= self.bounds.parameter
            and not self.differing_replicas
        )

    def note(self, key: Key, error: float) -> None:
        what, name = key
        if not error <= getattr(self, what):
            setattr(self, what, error if error == error else float("inf"))
            self.worst[what] = name


def train_one_device(
    job: Job, batches: Sequence[Any], *, nudge: Callable[[Tensor], Tensor] | None = None
) -> Trained:
    """Train the user's untouched module on the global microbatches, one after the other.

    Random operations of the step draw from the keys that the plan uses. What the user's optimizer leaves
    out has no part in the norm. It starts from the job's initial weights, or from what `nudge` makes of
    them.
    """
    plan = job.plan
    model = job.source.make_model()
    load_initial(model, job)
    if nudge is not None:
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(nudge(param))
    params = dict(model.named_parameters())
    optimizers = optimizers_of(job.optimizer, model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = {id(param) for group in groups for param in group["params"]}
    params = {name: param for name, param in params.items() if id(param) in stepped}
    pieces = plan.num_data_ranks * plan.num_microbatches
    run = eager_step(job, model)
    dtype = str(next(iter(params.values())).dtype).removeprefix("torch.")
    losses, gradients = [], []
    for step, batch in enumerate(batches):
        total = count = 0.0
        for piece in _order(plan):
            rows = _rows(batch, piece, pieces)
            with own_errors(dtype), own_experts(model), flex_on_cpu(), uncompiled():
                result = run(rows, step, piece)
            result, _ = loss_and_metrics(result)
            loss, weight = result if isinstance(result, tuple | list) else (result, 1.0)
            loss.backward()
            total += loss.item()
            count += float(weight.detach() if isinstance(weight, Tensor) else weight)
        if count == 0:
            raise RunError("the total count of the batch is 0: there is nothing to average")
        for param in params.values():
            if param.grad is not None:
                param.grad /= count
        losses.append(total / count)
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(params.values()), plan.clip)
        gradients.append({n: p.grad.clone() for n, p in params.items() if p.grad is not None})
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    final = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Trained(losses, gradients, final | _changed(plan, dict(model.named_buffers())))


def train(run: Run, batches: Sequence[Any]) -> Trained:
    """Train a run on the same batches."""
    losses, gradients = [], []
    for batch in batches:
        losses.append(run.step(batch).loss)
        gradients.append({name: grad.clone() for name, grad in run.gradients().items()})
    return Trained(losses, gradients, run.parameters() | _changed(run.plan, run.buffers()))


def _order(plan: Plan) -> list[int]:
    """The global microbatches as they lie in the batch or, where they change buffers, as a plan does:
    the first of every data rank, then the second."""
    ranks, microbatches = range(plan.num_data_ranks), range(plan.num_microbatches)
    if not any(tensor.changes for tensor in plan.tensors.values()):
        return [rank * len(microbatches) + m for rank in ranks for m in microbatches]
    return [rank * len(microbatches) + m for m in microbatches for rank in ranks]


def _changed(plan: Plan, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that forwards change; a counter is compared as a number."""
    return {
        name: buffer.detach().to(torch.float64, copy=True)
        for name, buffer in buffers.items()
        if plan.tensors[plain_name(name)].changes
    }


def compare(
    run: Run,
    batches: Sequence[Any],
    reference: Trained,
    *,
    bounds: Bounds | None = None,
    explained: Callable[[], Mapping[Key, Tensor]] | None = None,
) -> Errors:
    """Train a run and measure its distance from the reference.

    `explained` gives, per element, the error that rounding explains. It is called where an error is
    above its bound, and nowhere else.
    """
    trained = train(run, batches)
    errors = Errors(differing_replicas=run.differing_replicas(), bounds=bounds or Bounds())
    found, wanted = trained.tensors(), reference.tensors()
    for what, name in found.keys() ^ wanted.keys():
        errors.note((what, f"{name} is missing"), float("inf"))
    for key, value in wanted.items():
        if key in found:
            _judge(errors, key, found[key], value, explained)
    return errors


def _judge(
    errors: Errors,
    key: Key,
    mine: Tensor,
    other: Tensor,
    explained: Callable[[], Mapping[Key, Tensor]] | None,
) -> None:
    error, bound = relative_error(mine, other), getattr(errors.bounds, key[0])
    rounded = None
    if error > bound and explained is not None:
        rounded = _rounded(key, (mine - other).abs(), other, bound, explained()[key])
    if rounded is None:
        errors.note(key, error)
    else:
        errors.rounded.append(rounded)


def _rounded(
    key: Key, error: Tensor, other: Tensor, bound: float, explained: Tensor
) -> Rounded | None:
    """What rounding explains of an error above its bound; None if it does not explain all of it."""
    scale = float(other.norm()) or 1.0
    noise = explained >= other.abs()
    if explained.norm() >= scale:
        noise = torch.ones_like(noise)
    real = float(error[~noise].norm()) / scale
    allowed = float(explained[~noise].norm()) / scale
    if not (error[noise].norm() <= explained[noise].norm() and real <= max(bound, allowed)):
        return None
    return Rounded(
        *key,
        error=float(error.norm()) / scale,
        vanishing=int(noise.sum()),
        elements=noise.numel(),
        explained=allowed if real > bound else None,
    )


def relative_error(mine: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm; not-a-number counts as infinite."""
    scale = float(other.norm())
    error = float((mine - other).norm()) / (scale or 1.0)
    return error if error == error else float("inf")


def load_initial(model: nn.Module, job: Job) -> None:
    """Give a module the weights that the job's ranks start from."""
    named = (*model.named_buffers(), *model.named_parameters())
    tensors = {plain_name(name): tensor for name, tensor in named}
    weights = Weights(job.plan, job.bodies, job.stored, job.memory)
    with torch.no_grad():
        for name in job.plan.tensors:
            tensors[name].copy_(weights.whole(name))


def _rows(batch: Any, piece: int, pieces: int) -> Any:
    def part(leaf: Tensor) -> Tensor:
        rows = leaf.shape[0] // pieces
        return leaf[piece * rows : (piece + 1) * rows]

    return map_leaves(part, batch)
