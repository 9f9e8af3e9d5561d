"""verify: a job against the user's own module on one device, in eager autograd with torch.optim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper.api.job import Job
from piper.api.run import Run
from piper.bodies.leaves import map_leaves
from piper.errors import RunError
from piper.frontend.capture.capture import plain_name
from piper.frontend.capture.hf_experts import own_experts
from piper.runtime.factory import optimizers_of
from piper.runtime.worker.weights import initial_value
from piper.training.keyed_reference import eager_step

LOSS_BOUND = GRADIENT_BOUND = 1e-10
PARAMETER_BOUND = 1e-8


@dataclass(frozen=True)
class Trained:
    """What training gave: a loss per step, the gradients of each step, the final parameters."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


@dataclass
class Errors:
    """The largest relative errors, each with the tensor and step where it was found."""

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    differing_replicas: list[str] = field(default_factory=list)
    worst: dict[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether law 1 holds: bounds for float64, and replicas bit-equal."""
        return (
            self.loss <= LOSS_BOUND
            and self.gradient <= GRADIENT_BOUND
            and self.parameter <= PARAMETER_BOUND
            and not self.differing_replicas
        )


def train_one_device(job: Job, batches: Sequence[Any]) -> Trained:
    """Train the user's untouched module on the global microbatches, one after the other.

    Random operations of the step draw from the keys that the plan uses. What the user's optimizer leaves
    out has no part in the norm.
    """
    plan = job.plan
    model = job.source.make_model()
    load_initial(model, job)
    params = dict(model.named_parameters())
    optimizers = optimizers_of(job.optimizer, model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = {id(param) for group in groups for param in group["params"]}
    params = {name: param for name, param in params.items() if id(param) in stepped}
    pieces = plan.num_data_ranks * plan.num_microbatches
    run = eager_step(job, model)
    losses, gradients = [], []
    for step, batch in enumerate(batches):
        total = count = 0.0
        for piece in range(pieces):
            rows = _rows(batch, piece, pieces)
            with own_experts(model):
                result = run(rows, step, piece)
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
    return Trained(losses, gradients, final)


def train(run: Run, batches: Sequence[Any]) -> Trained:
    """Train a run on the same batches."""
    losses, gradients = [], []
    for batch in batches:
        losses.append(run.step(batch).loss)
        gradients.append({name: grad.clone() for name, grad in run.gradients().items()})
    return Trained(losses, gradients, run.parameters())


def compare(run: Run, batches: Sequence[Any], reference: Trained) -> Errors:
    """Train a run and measure its distance from the reference."""
    found = train(run, batches)
    errors = Errors(differing_replicas=run.differing_replicas())
    for step, (mine, other) in enumerate(zip(found.losses, reference.losses, strict=True)):
        _note(errors, "loss", abs(mine - other) / max(abs(other), 1e-300), f"step {step}")
        grads, wanted = found.gradients[step], reference.gradients[step]
        if grads.keys() != wanted.keys():
            name = next(iter(grads.keys() ^ wanted.keys()))
            _note(errors, "gradient", float("inf"), f"{name} is missing")
        for name in grads.keys() & wanted.keys():
            where = f"{name} in step {step}"
            _note(errors, "gradient", relative_error(grads[name], wanted[name]), where)
    for name in reference.parameters.keys() - found.parameters.keys():
        _note(errors, "parameter", float("inf"), f"{name} is missing")
    for name, value in found.parameters.items():
        _note(errors, "parameter", relative_error(value, reference.parameters[name]), name)
    return errors


def relative_error(mine: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm; not-a-number counts as infinite."""
    scale = float(other.norm())
    error = float((mine - other).norm()) / (scale or 1.0)
    return error if error == error else float("inf")


def _note(errors: Errors, what: str, error: float, where: str) -> None:
    if not error <= getattr(errors, what):
        setattr(errors, what, error if error == error else float("inf"))
        errors.worst[what] = where


def load_initial(model: nn.Module, job: Job) -> None:
    """Give a module the weights that the job's ranks start from."""
    named = (*model.named_buffers(), *model.named_parameters())
    tensors = {plain_name(name): tensor for name, tensor in named}
    with torch.no_grad():
        for name, spec in job.plan.tensors.items():
            tensors[name].copy_(initial_value(spec, job.bodies, seed=job.plan.seed))


def _rows(batch: Any, piece: int, pieces: int) -> Any:
    def part(leaf: Tensor) -> Tensor:
        rows = leaf.shape[0] // pieces
        return leaf[piece * rows : (piece + 1) * rows]

    return map_leaves(part, batch)
