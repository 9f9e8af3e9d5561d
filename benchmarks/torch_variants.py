"""What one rank runs of torch's own: a pipeline schedule, DDP, FSDP2, DeepSpeed, or compute alone."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from transformer import Batch, Sizes, Stage, Transformer, loss_of, step

Step = Callable[[Batch], float | None]  # one training step; the loss where this rank has it
Load = Callable[[nn.Module], nn.Module]  # fills a module with the initial weights

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def num_stages(schedule: str, num_ranks: int) -> int:
    return num_ranks * (1 if schedule == "1f1b" else 2)


def stages_of(schedule: str, rank: int, num_ranks: int) -> list[int]:
    """The stages of a rank: V schedules come back the way they went."""
    if schedule == "1f1b":
        return [rank]
    return [rank, rank + num_ranks if schedule.startswith("inter") else 2 * num_ranks - 1 - rank]


class Ranked:
    """What every variant needs to know of its rank."""

    def __init__(self, sizes: Sizes, load: Load, device: torch.device, *, compiled: bool) -> None:
        self.sizes, self.device, self.compiled = sizes, device, compiled
        self.load = load
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def stage(self, number: int, total: int) -> nn.Module:
        return self.filled(lambda: Stage(self.sizes, number, total))

    def whole(self) -> nn.Module:
        return self.filled(lambda: Transformer(self.sizes, 1))

    def filled(self, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):  # initial weights are made once, not twice
            module = make()
        return self.load(module.to_empty(device="cpu")).to(self.device)

    def maybe_compiled(self, module: nn.Module) -> nn.Module:
        if self.compiled:
            module.compile()
        return module

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        fused = {"fused": True} if self.device.type == "cuda" else {}
        return torch.optim.AdamW(params, lr=1e-4, **fused)


def pipeline(schedule: str, ranked: Ranked, wrap: Load = lambda module: module) -> Step:
    """A schedule of torch.distributed.pipelining over hand-made stages."""
    rank, total = ranked.rank, num_stages(schedule, ranked.num_ranks)
    numbers = stages_of(schedule, rank, ranked.num_ranks)
    modules = [wrap(ranked.stage(number, total)) for number in numbers]
    optimizer = ranked.optimizer([p for module in modules for p in module.parameters()])
    stages = [
        pipelining.PipelineStage(ranked.maybe_compiled(m), number, total, ranked.device)
        for m, number in zip(modules, numbers, strict=True)
    ]
    make = getattr(pipelining.schedules, SCHEDULES[schedule])
    given = stages[0] if schedule == "1f1b" else stages
    runner = make(given, n_microbatches=ranked.sizes.microbatches, loss_fn=loss_of)

    # Older versions of torch keep the outputs of the last stage whether wanted or not.
    takes = inspect.signature(runner.step).parameters
    quiet = {"return_outputs": False} if "return_outputs" in takes else {}

    def one(batch: Batch) -> float | None:
        losses: list[Tensor] = []
        tokens = (batch["tokens"],) if 0 in numbers else ()
        if total - 1 in numbers:
            target = {"target": batch["labels"], "losses": losses}
        else:
            target = {}
        runner.step(*tokens, **target, **quiet)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if losses else None

    return one


def data_parallel(ranked: Ranked, wrap: Callable[[nn.Module], nn.Module], *, sync: bool) -> Step:
    """Local microbatches one after the other; `sync` reduces after each of them, else after the last."""
    module = wrap(ranked.whole())
    optimizer = ranked.optimizer(module.parameters())
    num = ranked.sizes.microbatches // ranked.num_ranks
    rows = ranked.sizes.rows

    def one(batch: Batch) -> float:
        total = torch.zeros((), device=ranked.device)
        for m in range(num):
            first = (ranked.rank * num + m) * rows
            part = {k: v[first : first + rows] for k, v in batch.items()}
            with nullcontext() if sync or m == num - 1 else module.no_sync():  # type: ignore[operator]
                loss = step(module, part) / num
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return one


def ddp(ranked: Ranked) -> Step:
    return data_parallel(ranked, nn.parallel.DistributedDataParallel, sync=False)


def fsdp2(ranked: Ranked) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranked.device.type, (ranked.num_ranks,))

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return data_parallel(ranked, wrap, sync=True)


def deepspeed(ranked: Ranked) -> Step:
    """DeepSpeed's PipelineModule, which is 1F1B."""
    os.environ.setdefault("DS_ACCELERATOR", ranked.device.type)
    import deepspeed as ds
    from deepspeed.pipe import PipelineModule

    ds.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    layers = [ranked.stage(number, ranked.num_ranks) for number in range(ranked.num_ranks)]
    model = PipelineModule(
        layers=layers, num_stages=ranked.num_ranks, loss_fn=loss_of, partition_method="uniform"
    )
    sizes = ranked.sizes
    config = {
        "train_batch_size": sizes.rows * sizes.microbatches,
        "train_micro_batch_size_per_gpu": sizes.rows,
        "gradient_accumulation_steps": sizes.microbatches,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = ranked.optimizer(model.parameters())
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)

    def parts(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        pairs = zip(
            batch["tokens"].split(sizes.rows), batch["labels"].split(sizes.rows), strict=True
        )
        return iter(list(pairs))

    def one(batch: Batch) -> float:
        return float(engine.train_batch(data_iter=parts(batch)))

    return one


def make(name: str, ranked: Ranked) -> Step:
    if "@" in name:
        from torch_parallel import make_parallel

        return make_parallel(name, ranked)
    if name in SCHEDULES:
        return pipeline(name, ranked)
    return {"ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed}[name](ranked)


def plain(ranked: Ranked, wrap: Load | None = None) -> Step:
    """The whole model in one process: the loop that every variant must equal."""
    made = ranked.stage(0, 1)
    model, num = ranked.maybe_compiled(wrap(made) if wrap else made), ranked.sizes.microbatches
    optimizer = ranked.optimizer(model.parameters())

    def one(batch: Batch) -> float:
        total = torch.zeros((), device=ranked.device)
        parts = zip(*(batch[name].chunk(num) for name in ("tokens", "labels")), strict=True)
        for tokens, labels in parts:
            loss = step(model, {"tokens": tokens, "labels": labels}) / num
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return one


def alone(numbers: Sequence[int], total: int, microbatches: int, ranked: Ranked) -> Step:
    """The floor: forward, backward and optimizer of some stages, with nobody to talk to."""
    sizes = ranked.sizes
    modules = [ranked.stage(number, total) for number in numbers]
    optimizer = ranked.optimizer([p for module in modules for p in module.parameters()])
    shape = (sizes.rows, sizes.length, sizes.width)
    x = torch.randn(shape, dtype=getattr(torch, sizes.dtype), device=ranked.device)

    def one(batch: Batch) -> None:
        for m in range(microbatches):
            rows = slice(m * sizes.rows, (m + 1) * sizes.rows)
            for number, module in zip(numbers, modules, strict=True):
                first, last = number == 0, number == total - 1
                given = batch["tokens"][rows] if first else x.detach().requires_grad_()
                y = module(given)
                if last:
                    (loss_of(y, batch["labels"][rows]) / microbatches).backward()
                else:
                    y.backward(x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return one
