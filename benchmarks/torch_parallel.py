"""What one rank runs of torch's own where a pipeline meets data or expert parallelism, in two regimes:
`masters` keeps float32 parameters and computes in bfloat16, `pure` has bfloat16 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed_zero import deepspeed_zero
from megatron_layers import megatron
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from torch_variants import SCHEDULES, Ranked, Step, data_parallel, num_stages, pipeline, stages_of
from transformer import Batch, ExpertLayer, Stage, loss_of

import piper

REGIMES = ("masters", "pure")
LOWEST = torch.bfloat16


@cache
def mesh_of(device: str, **axes: int) -> DeviceMesh:
    """Made once in a process, as its communicators stay."""
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


@cache
def group_of(*groups: tuple[int, ...]) -> Any:
    """The one that this rank is in; made once, too."""
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(m for m, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def computing(ranked: Ranked, regime: str) -> AbstractContextManager[Any]:
    """Around forwards of a module that has float32 parameters."""
    if regime == "masters" and ranked.device.type == "cuda":
        return torch.autocast("cuda", LOWEST)
    return nullcontext()


class Casting(nn.Module):
    """A module whose forward computes as its regime says."""

    def __init__(self, module: nn.Module, ranked: Ranked, regime: str) -> None:
        super().__init__()
        self.module, self.ranked, self.regime = module, ranked, regime

    def forward(self, *inputs: Tensor) -> Tensor:
        with computing(self.ranked, self.regime):
            found: Tensor = self.module(*inputs)
        return found


def alone(ranked: Ranked, regime: str) -> Step:
    """One process, without anybody to talk to."""
    return data_parallel(
        ranked, lambda model: ranked.maybe_compiled(Casting(model, ranked, regime)), sync=True
    )


def _load_ddp(ranked: Ranked, regime: str) -> None:
    """A step of a group of one. A kernel that is loaded beside communication may wait for it, and it for
    the kernel: with nobody else in the group it waits for nobody."""
    group = group_of(*((rank,) for rank in range(ranked.num_ranks)))
    tiny = Casting(nn.Linear(64, 64, bias=False).to(ranked.device), ranked, regime)
    tiny.to(getattr(torch, ranked.sizes.dtype))
    wrapped = nn.parallel.DistributedDataParallel(
        tiny, process_group=group, gradient_as_bucket_view=True
    )
    given = torch.ones(64, 64, dtype=tiny.module.weight.dtype, device=ranked.device)
    for _ in range(3):
        with wrapped.no_sync():
            wrapped(given).float().sum().backward()
        wrapped(given).float().sum().backward()
    if ranked.device.type == "cuda":
        torch.cuda.synchronize()


def ddp(ranked: Ranked, regime: str) -> Step:
    _load_ddp(ranked, regime)

    def wrap(model: nn.Module) -> nn.Module:
        casting = Casting(model, ranked, regime)
        return nn.parallel.DistributedDataParallel(casting, gradient_as_bucket_view=True)

    return data_parallel(ranked, wrap, sync=False)


def shard(module: nn.Module, mesh: DeviceMesh, ranked: Ranked, regime: str, **options: Any) -> None:
    """FSDP2 over each layer and the rest; with float32 masters it also reduces in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if regime == "masters" and ranked.device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=LOWEST, reduce_dtype=torch.float32)
    layers: Any = module.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


class Again(nn.Module):
    """A layer of which only the input is kept: its backward computes the rest again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self.module, *inputs, use_reentrant=False)


def keep_inputs(module: nn.Module) -> None:
    layers: Any = module.layers
    for name, layer in list(layers.named_children()):
        layers._modules[name] = Again(layer)


def fsdp2(ranked: Ranked, regime: str) -> Step:
    """Reduces after each backward, as it does unless it is told otherwise."""
    mesh = mesh_of(ranked.device.type, dp=ranked.num_ranks)

    def wrap(model: nn.Module) -> nn.Module:
        shard(model, mesh, ranked, regime)
        return model

    return data_parallel(ranked, wrap, sync=True)


def tensor_parallel(ranked: Ranked, regime: str, *, tp: int, sequence: bool) -> Step:
    """DTensor's styles over `tp` ranks, with the loss over a cut vocabulary; sums over the others."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = mesh_of(ranked.device.type, dp=ranked.num_ranks // tp, tp=tp)
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for number in range(ranked.sizes.layers):
        for half, columns, row in (
            ("attention", ("q", "k", "v"), "out"),
            ("feed", ("gate", "up"), "down"),
        ):
            name = f"layers.{number}.{half}"
            plan[name] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
            plan |= {f"{name}.{column}": ColwiseParallel() for column in columns}
            plan[f"{name}.{row}"] = RowwiseParallel(output_layouts=between)
            if sequence:
                plan[f"layers.{number}.norm{1 if half == 'attention' else 2}"] = SequenceParallel()
    module = parallelize_module(ranked.whole(), mesh["tp"], plan)
    optimizer = ranked.optimizer(_by_kind(module))
    data = mesh["dp"].get_group()
    place, places = mesh["dp"].get_local_rank(), mesh["dp"].size()
    num, rows = ranked.sizes.microbatches // places, ranked.sizes.rows

    def one(batch: Batch) -> float:
        total = torch.zeros((), device=ranked.device)
        for m in range(num):
            first = (place * num + m) * rows
            part = {k: v[first : first + rows] for k, v in batch.items()}
            with loss_parallel(), computing(ranked, regime):
                loss = loss_of(module(part["tokens"]), part["labels"]) / num
                loss.backward()
            total += loss.detach().full_tensor()
        if places > 1:
            for param in module.parameters():
                assert param.grad is not None
                grad = getattr(param.grad, "_local_tensor", param.grad)
                dist.all_reduce(grad.div_(places), group=data)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return one


def _by_kind(module: nn.Module) -> list[dict[str, Any]]:
    """Groups of DTensors and of others, which one call of a fused optimizer does not take together."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for param in module.parameters():
        kinds.setdefault(type(param.data), []).append(param)
    return [{"params": params} for params in kinds.values()]


def pipelined(
    schedule: str,
    ranked: Ranked,
    *,
    make: Callable[[int, int], nn.Module],
    finish: Callable[[], None] = lambda: None,
) -> Step:
    """A pipeline over two ranks beside another of the same, each with its half of the batch. `finish` is
    what remains to be done to gradients."""
    rank, other = divmod(ranked.rank, 2)
    total = num_stages(schedule, 2)
    numbers = stages_of(schedule, rank, 2)
    modules = [make(number, total) for number in numbers]
    group = group_of((0, 2), (1, 3))
    stages = [
        pipelining.PipelineStage(
            ranked.maybe_compiled(m), number, total, ranked.device, group=group
        )
        for m, number in zip(modules, numbers, strict=True)
    ]
    runner_class = getattr(pipelining.schedules, SCHEDULES[schedule])
    microbatches = ranked.sizes.microbatches // 2
    runner = runner_class(
        stages[0] if schedule == "1f1b" else stages, n_microbatches=microbatches, loss_fn=loss_of
    )
    optimizer = ranked.optimizer([p for module in modules for p in module.parameters()])
    rows = microbatches * ranked.sizes.rows

    def one(batch: Batch) -> float | None:
        mine = {k: v[other * rows : (other + 1) * rows] for k, v in batch.items()}
        losses: list[Tensor] = []
        tokens = (mine["tokens"],) if 0 in numbers else ()
        last = total - 1 in numbers
        runner.step(*tokens, **({"target": mine["labels"], "losses": losses} if last else {}))
        finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if losses else None

    return one


def pp_fsdp2(ranked: Ranked, regime: str, *, reshard: bool, again: bool) -> Step:
    """1F1B over two stages, each sharded over two ranks. The pipeline's runtime reduces gradients once,
    after the last backward. `again`: backwards compute layers again."""
    mesh = mesh_of(ranked.device.type, pp=2, dp=2)

    def make(number: int, total: int) -> nn.Module:
        module = ranked.stage(number, total)
        if again:
            keep_inputs(module)
        shard(module, mesh["dp"], ranked, regime, reshard_after_forward=reshard)
        return module

    return pipelined("1f1b", ranked, make=make)


class _Exchange(torch.autograd.Function):
    """Rows to where their experts are; their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sent, received = ctx.splits
        return _moved(grads[0].contiguous(), received, sent, ctx.group), None, None, None


def _moved(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows, received, sent, group=group)
    return found


class SharedExperts(nn.Module):
    """The experts of a layer that one of two ranks has, and the way to them."""

    def __init__(self, layer: ExpertLayer, group: Any) -> None:
        super().__init__()
        part, parts = dist.get_rank(group), dist.get_world_size(group)
        self.up = nn.Parameter(layer.up.detach().chunk(parts)[part].clone())
        self.down = nn.Parameter(layer.down.detach().chunk(parts)[part].clone())
        self.group, self.parts = group, parts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts, group=self.group)
        by_rank = torch.stack(
            [counts.view(self.parts, -1).sum(1), there.view(self.parts, -1).sum(1)]
        )
        sent, received = by_rank.tolist()
        rows = _Exchange.apply(rows, sent, received, self.group)
        experts = torch.arange(len(self.up), device=rows.device).repeat(self.parts)
        order = torch.repeat_interleave(experts, there, output_size=len(rows)).argsort(stable=True)
        mine = there.view(self.parts, -1).sum(0)
        up, down = self.up.to(rows.dtype), self.down.to(rows.dtype)
        hidden = F.silu(piper.grouped_mm(rows.index_select(0, order), up, mine))
        made = piper.grouped_mm(hidden, down, mine)
        back = torch.zeros_like(made).index_copy(0, order, made)
        found: Tensor = _Exchange.apply(back, received, sent, self.group)
        return found


class SharedExpertLayer(ExpertLayer):
    """The same layer, whose experts two ranks share."""

    def share(self, group: Any) -> None:
        self.shared = SharedExperts(self, group)
        del self.up, self.down

    def fed(self, rows: Tensor, counts: Tensor) -> Tensor:
        lowest = rows.to(LOWEST) if torch.is_autocast_enabled(rows.device.type) else rows
        found: Tensor = self.shared(lowest, counts)
        return found


def experts(schedule: str, ranked: Ranked, regime: str) -> Step:
    """A pipeline over two stages whose experts two ranks share; the rest is reduced after the last
    backward, in one all_reduce a parameter."""
    group = group_of((0, 1), (2, 3))
    dense: list[nn.Parameter] = []
    owned: list[nn.Parameter] = []

    def make(number: int, total: int) -> nn.Module:
        module = ranked.filled(lambda: Stage(ranked.sizes, number, total, SharedExpertLayer))
        for layer in module.layers.values():  # type: ignore[union-attr, operator]
            layer.share(group)
            owned.extend(layer.shared.parameters())
        kept = {id(param) for param in owned}
        dense.extend(param for param in module.parameters() if id(param) not in kept)
        return Casting(module, ranked, regime)

    def finish() -> None:
        for param in _with_gradient(owned):
            param.grad /= 2  # type: ignore[operator]
        for param in _with_gradient(dense):
            assert param.grad is not None
            dist.all_reduce(param.grad, group=group)
            param.grad /= 2

    return pipelined(schedule, ranked, make=make, finish=finish)


def _with_gradient(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.grad is not None]


def make_parallel(name: str, ranked: Ranked) -> Step:
    """By `variant@regime`: plain, ddp, fsdp2, pp_fsdp2 and pp_fsdp2_whole, also with _again; tp2 or
    tp4, or tp2_sp, also as megatron:tp2; pp: or experts: and a schedule; or deepspeed: and a level of
    ZeRO."""
    variant, _, regime = name.partition("@")
    if variant.startswith("pp:"):
        schedule = variant.partition(":")[2]
        return pipeline(schedule, ranked, lambda module: Casting(module, ranked, regime))
    if variant.startswith("deepspeed:"):
        return deepspeed_zero(int(variant.partition(":")[2]), ranked, regime)
    if variant.startswith("experts:"):
        return experts(variant.partition(":")[2], ranked, regime)
    if variant.startswith(("tp", "megatron:tp")):
        make = megatron if ":" in variant else tensor_parallel
        degree = variant.rpartition("tp")[2]
        return make(ranked, regime, tp=int(degree[0]), sequence=degree.endswith("_sp"))
    if variant.startswith("pp_fsdp2"):
        again = variant.endswith("_again")
        return pp_fsdp2(ranked, regime, reshard="whole" not in variant, again=again)
    return {"plain": alone, "ddp": ddp, "fsdp2": fsdp2}[variant](ranked, regime)
