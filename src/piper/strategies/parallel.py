"""parallel: pipeline, data and expert parallelism composed from their degrees."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Literal

import msgspec

from piper.cost.machine_file import machine_of
from piper.directives.recompute import Keep
from piper.directives.schedule import Schedule
from piper.directives.shard import MAX_LOAD
from piper.directives.shard_tensor import LEAF
from piper.errors import MeshError, ScheduleError, naming_arguments, naming_line
from piper.ir.attention_forms import Attention
from piper.ir.history import Composed
from piper.ir.precisions import Precision
from piper.ir.select import Selector, where
from piper.mesh import Mesh
from piper.schedules import schedule as make_table
from piper.schedules import takes_stages_per_rank
from piper.schedules.action_costs import Costs
from piper.schedules.catalog import Schedulable, check_known, is_file, takes_costs
from piper.schedules.read import read_table
from piper.schedules.table import Table


@naming_arguments
@naming_line("parallel")
def parallel(
    *,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    tp: int = 1,
    sp: bool = False,
    etp: int | None = None,
    strips: int = 1,
    cp: int = 1,
    cp_attention: Attention = "gather",
    zero: int = 0,
    schedule: Schedulable = "1f1b",
    microbatches: int | None = None,
    bucket_size: int | str | None = None,
    prefetch: int = 1,
    reduce_every: int | str | None = None,
    reuse: int | str | None = None,
    max_load: float = MAX_LOAD,
    recompute: Keep | None = None,
    costs: Mapping[str, float] | Literal["measure"] | None = None,
    machine: Any = None,
    precision: Precision | str | None = None,
    stage_tag: str = "PP",
    expert_tag: str = "EP",
) -> Callable[[Schedule], None]:
    """A strategy of `pp` pipeline ranks by `dp` data ranks by `cp` by `tp` ranks; `ep` divides `dp`.

    World size is pp x dp x cp x tp. Experts are split over `ep` ranks and copied over the dp / ep
    others; everything else is copied over all data ranks. Over `tp` ranks matrices and tables are cut,
    as `shard_tensor` finds it; with `sp` also what lies between them, along dim 1 of the batch's leaves
    of integers. `strips` are those of `shard_tensor`. Each expert is cut over `etp` ranks, all of `tp`
    or 1. With 1 experts stay whole, each rank sends them its own part of the tokens, and `ep` counts the
    ranks of `tp`, too. Over `cp` ranks leaves of integers are cut themselves; `cp_attention` is the
    `attention` of `shard_tensor`. `zero`, `bucket_size`, `prefetch`, `reduce_every` and `reuse` are
    those of `replicate`, `max_load` that of `shard`; `recompute` is what to keep where all else is
    computed again.

    Tagged regions are shared out evenly over the stages of the schedule; a model without any is cut
    into as many, of about equal `costs`, which are those of `cut`. The schedule is a name, a .csv or
    .json file, a table, or a function that gives rows (see `piper.schedules`). There are as many
    microbatches as a file or table has, else 1. A schedule that goes by costs ("auto") takes them from
    a `machine`, where one is given, computing in a `precision`: both as in `lower`.
    """
    call = _call(locals())
    counts = {"pp": pp, "dp": dp, "ep": ep, "tp": tp, "cp": cp, "microbatches": microbatches or 1}
    for name, count in counts.items():
        if not isinstance(count, int):
            raise MeshError(f"{name}={count!r}", legal="a whole number, at least 1")
    if sp and tp == 1:
        raise MeshError("sp=True, but no ranks share tensors", legal="tp=2 or more with sp=True")
    if strips != 1 and tp == 1:
        raise MeshError(
            f"strips={strips!r}, but no ranks share tensors", legal="tp=2 or more with strips=2"
        )
    whole_experts = _experts_stay_whole(etp, tp, sp)
    data_ep = _data_ranks_of_experts(ep, dp, tp if whole_experts else 1)
    if cp == 1 and cp_attention != "gather":
        raise MeshError(
            f"cp_attention={cp_attention!r}, but no ranks share sequences",
            legal=f"cp=2 or more with cp_attention={cp_attention!r}",
        )
    check_known(schedule)
    if isinstance(schedule, os.PathLike) or (isinstance(schedule, str) and is_file(schedule)):
        schedule = read_table(schedule)
    if microbatches is None:
        microbatches = schedule.num_microbatches if isinstance(schedule, Table) else 1
    if pp == 1 and not isinstance(schedule, str):  # a name says nothing about one rank
        make_table(schedule, num_ranks=1, num_microbatches=microbatches)

    def strategy(s: Schedule) -> None:
        before, s.composed = s.composed, call
        try:
            compose(s)
        finally:
            s.composed = before

    def compose(s: Schedule) -> None:
        if costs is not None and (pp == 1 or s.tags.get(stage_tag)):
            raise ScheduleError(
                f"costs={costs!r}, but no stages are cut",
                legal=f"pp=2 or more and a model without {stage_tag} tags, or no costs",
            )
        mesh = s.mesh(pp=pp, dp=dp // data_ep, ep=data_ep, **_more(cp=cp, tp=tp))
        if (ep > 1 or whole_experts) and not s.tags.get(expert_tag):
            raise MeshError(
                f"{f'ep={ep}' if ep > 1 else f'etp={etp}'}, but no region has the tag {expert_tag}",
                legal=f'tag the experts with annotate("{expert_tag}")',
            )
        table = None
        if pp > 1:
            # Costs are known once all is placed and split: until then, where stages lie.
            by_costs = machine is not None and takes_costs(schedule)
            first: Schedulable = "1f1b" if by_costs and schedule == "auto" else schedule
            if not s.tags.get(stage_tag):
                uncut = _table(first, pp, microbatches, 0)
                s.cut(
                    stage_tag,
                    uncut.num_stages,
                    costs=costs,
                    rows=_rows(s, dp * microbatches, costs),
                    together=_together(uncut),
                )
            regions = s.tags[stage_tag]
            table = _table(first, pp, microbatches, len(regions))
            stages = _stages(table, regions, stage_tag)
            _place(s, mesh, table, stages, stage_tag)
        else:
            s.place(where(), mesh.at(pp=0))
        options: Any = {
            "zero": zero, "bucket_size": bucket_size, "prefetch": prefetch,
            "reduce_every": reduce_every, "reuse": reuse,
        }  # fmt: skip
        if ep > 1:
            s.replicate(tagged((expert_tag, None)), over=("dp", "ep"), **options)
            s.replicate(tagged((expert_tag, "*")), over="dp", **options)
            over = ("ep", "tp") if whole_experts else "ep"
            s.shard(tagged((expert_tag, "*")), over=over, max_load=max_load)
        else:
            s.replicate(where(), over=("dp", "ep"), **options)
        if cp > 1:
            leaves = _sequence(s, cp * tp if sp else cp)
            s.shard_tensor(where(), over="cp", params={}, batch=leaves, attention=cp_attention)
        if tp > 1:
            dense = tagged((expert_tag, None)) if whole_experts else where()
            marks = _sequence(s, tp) if sp else None
            s.shard_tensor(dense, over="tp", sequence=marks, strips=strips)
        if whole_experts and ep == 1:
            s.shard_tensor(tagged((expert_tag, "*")), over="tp", params={}, strips=strips)
        if recompute is not None:
            s.recompute(where(), keep=recompute)
        s.split(where(), "MB", microbatches // (table.num_directions if table else 1))
        if table is not None:
            if by_costs:
                found = s.stage_costs(machine, tag=stage_tag, stages=stages, precision=precision)
                table = _table(schedule, pp, microbatches, len(regions), costs=found)
                name = f"{table.name} for {machine_of(machine).name}"
                table = msgspec.structs.replace(table, name=name)
            plain = all(len(members) == 1 for members in stages)
            s.order(table, tag=stage_tag, stages=None if plain else stages)

    return strategy


def _call(given: Mapping[str, Any]) -> Composed:
    """What was given beside the defaults; of objects their names."""
    parameters = signature(parallel).parameters
    said = {name: value for name, value in given.items() if value != parameters[name].default}
    return Composed(
        "parallel",
        {
            name: value
            if isinstance(value, str | int | float)
            else str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
            for name, value in said.items()
        },
    )


def _experts_stay_whole(etp: int | None, tp: int, sp: bool) -> bool:
    """Whether ranks that share other tensors hold whole experts."""
    if etp not in (None, 1, tp):
        raise MeshError(
            f"etp={etp!r} with tp={tp}", legal=f"etp=1, or etp={tp}: that is the default"
        )
    whole = etp == 1 and tp > 1
    if whole and not sp:
        raise MeshError(
            f"etp=1, but all {tp} ranks of tp have the same tokens",
            legal="sp=True with etp=1, so that each has its part of them",
        )
    return whole


def _data_ranks_of_experts(ep: int, dp: int, tp: int) -> int:
    """Over how many data ranks experts are split, of `ep` ranks in all; with each of these go `tp`."""
    data_ep = 1 if ep == 1 else ep // tp
    if data_ep > 0 and dp % data_ep == 0 and ep in (1, data_ep * tp):
        return data_ep
    if tp == 1:
        raise MeshError(
            f"ep={ep} does not divide dp={dp}", legal=f"ep=1, or another divisor of dp={dp}"
        )
    raise MeshError(
        f"ep={ep} with etp=1, where experts are on all tp={tp} ranks of some of dp={dp}",
        legal="ep=" + " or ".join(["1", *(str(tp * n) for n in range(1, dp + 1) if dp % n == 0)]),
    )


def _more(**sizes: int) -> dict[str, int]:
    """Axes that a mesh has only if they have several ranks."""
    return {axis: size for axis, size in sizes.items() if size > 1}


def _sequence(s: Schedule, size: int) -> dict[str, int]:
    """The leaves of the batch that are sequences of tokens, whose dim 1 is cut."""
    leaves = {
        name.partition("[")[0].removeprefix(LEAF): 1
        for name, value in s.graph.values.items()
        if value.role == "batch" and len(value.shape) > 1 and value.dtype.startswith("int")
        if value.shape[1] % size == 0
    }
    if not leaves:
        raise MeshError(
            f"no leaf of the batch is a sequence of integers that divides over tp={size}",
            legal='shard_tensor(where(), over="tp", sequence={"tokens": 1}) names one',
        )
    return leaves


def _stages(table: Table, regions: list[int], tag: str) -> list[list[int]]:
    """The regions of each stage of the table."""
    size, left = divmod(len(regions), table.num_stages)
    if left or not size:
        raise ScheduleError(
            f"{len(regions)} regions do not divide over the {table.num_stages} stages of "
            f"schedule {table.name}",
            legal=f'tag a multiple of {table.num_stages} regions with annotate("{tag}")',
        )
    return [regions[i : i + size] for i in range(0, len(regions), size)]


def _together(table: Table) -> tuple[tuple[int, ...], ...] | None:
    """The stages of each rank, if some rank has several and each stage is in one such group."""
    ranks = (sorted({a.stage for cell in row for a in cell.actions}) for row in table.rows)
    groups = tuple(dict.fromkeys(map(tuple, ranks)))
    once = sum(map(len, groups)) == table.num_stages
    return groups if once and len(groups) < table.num_stages else None


def _place(s: Schedule, mesh: Mesh, table: Table, stages: list[list[int]], tag: str) -> None:
    """Every stage where the table runs it; with two directions, each half of the batch by itself."""
    if table.num_directions > 1:
        s.split(where(), "DIR", table.num_directions)
    for direction, rank_of in enumerate(table.placement()):
        way = (("DIR", direction),) if table.num_directions > 1 else ()
        for stage, members in enumerate(stages):
            for region in members:
                s.place(tagged((tag, region), *way), mesh.at(pp=rank_of[stage]))


def _rows(s: Schedule, pieces: int, costs: object) -> int | None:
    """The samples of one microbatch on one rank, which are measured."""
    if costs != "measure":
        return None
    batch = next(v.type.shape[0] for v in s.graph.values.values() if v.role == "batch")
    return max(1, batch // pieces)


def _table(
    schedule: Schedulable,
    num_ranks: int,
    num_microbatches: int,
    num_regions: int,
    **options: Costs,
) -> Table:
    """The schedule's table; one with several stages a rank takes as many as the model has."""
    per_rank = num_regions // num_ranks
    chosen = takes_stages_per_rank(schedule) and per_rank > 1
    return make_table(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=per_rank if chosen else None,
        **options,
    )


def tagged(*pairs: tuple[str, int | str | None]) -> Selector:
    return Selector(pairs)
