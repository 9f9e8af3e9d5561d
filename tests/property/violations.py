"""Violations: a legal strategy in, the same with one illegal directive and its line out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .models import BATCH
from .programs import Line, Strategy, line


@dataclass(frozen=True)
class Illegal:
    """An illegal strategy; the error has to name one of the lines."""

    kind: str
    strategy: Strategy
    lines: tuple[int, ...]  # indexes

    @property
    def source_lines(self) -> list[int]:
        return [self.strategy.source_line(index) for index in self.lines]

    def __repr__(self) -> str:
        return f"{self.kind}, refused in line {self.source_lines} of\n{self.strategy!r}"


Violation = Callable[[Strategy, Random], Illegal | None]
VIOLATIONS: dict[str, Violation] = {}


def _violation(function: Callable[[Strategy, Random], Any]) -> Callable[[Strategy, Random], Any]:
    name = function.__name__.strip("_")

    def run(strategy: Strategy, rng: Random) -> Illegal | None:
        found = function(strategy, rng)
        return None if found is None else Illegal(name, *found)

    VIOLATIONS[name] = run
    return function


def random_violation(strategy: Strategy, rng: Random) -> Illegal:
    """The strategy with one violation, of a kind that can be planted in it."""
    for name in rng.sample(list(VIOLATIONS), len(VIOLATIONS)):
        found = VIOLATIONS[name](strategy, rng)
        if found is not None:
            return found
    raise AssertionError("unknown tags fit everywhere")


Found = tuple[Strategy, Sequence[int]] | None


def _insert(strategy: Strategy, rng: Random, *codes: str, late: bool = False) -> Found:
    """One of the codes somewhere behind mesh, cut and streams; `late`: behind everything."""
    lines = list(strategy.lines)
    start = max(strategy.lines_of("mesh", "cut", "stream"), default=-1) + 1
    at = len(lines) if late else rng.randint(start, len(lines))
    code = rng.choice(codes)
    return strategy.with_lines([*lines[:at], line(code), *lines[at:]]), (at,)


def _exchange(strategy: Strategy, index: int, old: str, new: str) -> Found:
    lines = list(strategy.lines)
    code = lines[index].code
    if old not in code:
        return None
    lines[index] = replace(lines[index], code=code.replace(old, new, 1))
    return strategy.with_lines(lines), (index,)


def _remove(strategy: Strategy, index: int) -> Strategy:
    return strategy.with_lines(one for at, one in enumerate(strategy.lines) if at != index)


def _any_axis(strategy: Strategy) -> str:
    return next(iter(strategy.sizes), "dp")


def _wide(strategy: Strategy) -> list[str]:
    return [axis for axis in strategy.data_axes if strategy.sizes[axis] > 1]


# Names that do not exist


@_violation
def _unknown_tag(strategy: Strategy, rng: Random) -> Found:
    return _insert(strategy, rng, "s.recompute(where(QQ=0))", 's.recompute(where(PPP="*"))')


@_violation
def _unknown_tag_in_order(strategy: Strategy, rng: Random) -> Found:
    code = "s.order([where(phase='F'), where(MBB=0, phase='B')])"
    return _insert(strategy, rng, code)


@_violation
def _empty_selection(strategy: Strategy, rng: Random) -> Found:
    if not strategy.num_stages:
        return None
    return _insert(
        strategy, rng, "s.recompute(where(PP=99))", "s.order([where(PP=99), where(PP=0)])"
    )


@_violation
def _bad_selector(strategy: Strategy, rng: Random) -> Found:
    return _insert(strategy, rng, "s.recompute(where(phase='X'))", "s.recompute(where(PP='first'))")


@_violation
def _unknown_axis(strategy: Strategy, rng: Random) -> Found:
    return _insert(
        strategy,
        rng,
        's.replicate(where(), over="nowhere")',
        's.shard(where(), over="nowhere")',
        's.replicate(where(), over=("dp", "nowhere"))',
    )


@_violation
def _unknown_place(strategy: Strategy, rng: Random) -> Found:
    places = strategy.lines_of("place")
    if not places:
        return None
    index = rng.choice(places)
    axis = strategy.place_axes[0]
    old = strategy.lines[index].code.split("mesh.at", 1)[1]
    return _exchange(
        strategy,
        index,
        f"mesh.at{old}",
        rng.choice(
            ["mesh.at(nowhere=0))", f"mesh.at({axis}=99))", f"mesh.at({axis}=-1))", "'pp=0')"]
        ),
    )


@_violation
def _unknown_stream(strategy: Strategy, rng: Random) -> Found:
    axis = _any_axis(strategy)
    if axis not in strategy.sizes:
        return None
    codes = [f's.replicate(where(), over="{axis}", {kind}="nothing")' for kind in _STREAMS]
    return _insert(strategy, rng, *codes)


_STREAMS = ("reduce_stream", "gather_stream")


@_violation
def _stream_twice(strategy: Strategy, rng: Random) -> Found:
    known = strategy.lines_of("stream")
    if not known:
        return None
    name = strategy.lines[known[0]].code.split('"')[1]
    return _insert(strategy, rng, f's.stream("{name}")')


@_violation
def _mesh_twice(strategy: Strategy, rng: Random) -> Found:
    return _insert(strategy, rng, "s.mesh(dp=2)") if strategy.sizes else None


@_violation
def _bad_mesh(strategy: Strategy, rng: Random) -> Found:
    meshes = strategy.lines_of("mesh")
    if not meshes or not strategy.sizes:
        return None
    axis, size = next(iter(strategy.sizes.items()))
    wrong = rng.choice(["0", "-2", "2.0", "'2'", "None"])
    return _exchange(strategy, meshes[0], f"{axis}={size}", f"{axis}={wrong}")


# Axes and slices


@_violation
def _doubly_owned(strategy: Strategy, rng: Random) -> Found:
    owning = strategy.lines_of("replicate", "shard")
    if not owning:
        return None
    index = rng.choice(owning)
    found = _insert(strategy, rng, strategy.lines[index].code)
    # The second of the two is refused. A copy for one phase may meet halves instead.
    assert found is not None
    (at,) = found[1]
    if "phase" in strategy.lines[index].code:
        return None
    return found[0], (max(at, index + (at <= index)),)


@_violation
def _placed_and_owned(strategy: Strategy, rng: Random) -> Found:
    if not strategy.place_axes:
        return None
    axis = strategy.place_axes[0]
    return _insert(strategy, rng, f's.replicate(where(), over="{axis}")')


@_violation
def _unowned(strategy: Strategy, rng: Random) -> Found:
    wide = _wide(strategy)
    owning = [i for i in strategy.lines_of("replicate") if any(_over(strategy, i, a) for a in wide)]
    if not owning:
        return None
    made = _remove(strategy, rng.choice(owning))
    return made, made.lines_of("mesh")


def _over(strategy: Strategy, index: int, axis: str) -> bool:
    code = strategy.lines[index].code
    return f'"{axis}"' in code or f"'{axis}'" in code


@_violation
def _two_slices(strategy: Strategy, rng: Random) -> Found:
    places = strategy.lines_of("place")
    axes = [axis for axis in strategy.place_axes if strategy.sizes[axis] > 1]
    if not places or not axes:
        return None
    index = rng.choice(places)
    code = strategy.lines[index].code
    at = int(code.split(f"{axes[0]}=")[1][0])
    other = (at + 1) % strategy.sizes[axes[0]]
    found = _insert(strategy, rng, code.replace(f"{axes[0]}={at}", f"{axes[0]}={other}"))
    assert found is not None
    (new,) = found[1]
    if "DIR" in code and not any(i < new for i in strategy.lines_of("split")):
        return None  # refused for another reason
    if "DIR" in code:
        return found[0], (new, index + (new <= index))
    return found[0], (max(new, index + (new <= index)),)


@_violation
def _unplaced(strategy: Strategy, rng: Random) -> Found:
    places = strategy.lines_of("place")
    if len(places) < 2:
        return None
    made = _remove(strategy, rng.choice(places))
    return made, made.lines_of("mesh")


@_violation
def _idle_slices(strategy: Strategy, rng: Random) -> Found:
    axes = [axis for axis in strategy.place_axes if strategy.sizes[axis] > 1]
    if not axes or strategy.tables:
        return None
    axis = axes[0]
    lines = [_at_zero(one, axis) for one in strategy.lines]
    made = strategy.with_lines(lines)
    return made, made.lines_of("mesh")


def _at_zero(one: Line, axis: str) -> Line:
    if one.kind != "place":
        return one
    head, _, tail = one.code.partition("mesh.at(")
    words = [f"{axis}=0" if w.startswith(f"{axis}=") else w for w in tail[:-2].split(", ")]
    return replace(one, code=f"{head}mesh.at({', '.join(words)}))")


@_violation
def _unequal_slices(strategy: Strategy, rng: Random) -> Found:
    places = strategy.lines_of("place")
    if len(places) < 2 or strategy.tables:
        return None
    index = rng.choice(places)
    old = strategy.lines[index].code.split("mesh.at", 1)[1]
    found = _exchange(strategy, index, f"mesh.at{old}", "mesh.at())")
    assert found is not None
    return found[0], found[0].lines_of("place")


@_violation
def _phases_apart(strategy: Strategy, rng: Random) -> Found:
    """The forward of a chunk has an owner of an axis that its backward has not."""
    wide = _wide(strategy)
    owning = [i for i in strategy.lines_of("replicate") if any(_over(strategy, i, a) for a in wide)]
    if not owning or "phase" in strategy.source.split("s.order")[0]:
        return None
    index = rng.choice(owning)
    if "phase" in strategy.lines[index].code:
        return None
    code = strategy.lines[index].code.replace("where()", "where(phase='F')", 1)
    if code == strategy.lines[index].code:
        code = code.replace("), over", ", phase='F'), over", 1)
    lines = list(strategy.lines)
    lines[index] = replace(lines[index], code=code)
    made = strategy.with_lines(lines)
    return made, (index, *made.lines_of("mesh"))


# Values of options


@_violation
def _bad_options(strategy: Strategy, rng: Random) -> Found:
    if not strategy.sizes:
        return None
    wrong = rng.choice(_BAD_OPTIONS)
    return _insert(strategy, rng, f's.replicate(where(), over="{_any_axis(strategy)}", {wrong})')


_BAD_OPTIONS = (
    "zero=4", "zero=-1", "zero='2'", "zero=None", "prefetch=-1", "prefetch=1.5", "prefetch=None",
    "reuse=0", "reuse='1'", "bucket_size=0", "bucket_size=-3", "bucket_size=1.5",
    "bucket_size='5 parsecs'", "bucket_size='MiB'", "reduce_every=1", "zero=2, reduce_every=0",
    "zero=3, reduce_every='end'", "zero=2, reduce_every=True", "zero=3, reuse='always'",
    "reuse=1", "zero=1, reuse=2", "zero=2, reuse=3",
)  # fmt: skip


@_violation
def _bad_over(strategy: Strategy, rng: Random) -> Found:
    return _insert(strategy, rng, "s.replicate(where(), over=3)", "s.shard(where(), over=None)")


@_violation
def _differing_zero(strategy: Strategy, rng: Random) -> Found:
    """Regions that share a parameter are replicated in two ways."""
    wide = _wide(strategy)
    shared = {stage for stages in strategy.spec.alike() if len(stages) > 1 for stage in stages}
    found = []
    for index in strategy.lines_of("replicate"):
        code = strategy.lines[index].code
        local = any(f"where(PP={s}{more})" in code for s in shared for more in ("", ", EP=None"))
        if local and all(_over(strategy, index, axis) for axis in wide) and wide:
            found.append(index)
    if not found:
        return None
    code = strategy.lines[found[0]].code
    if "zero=" in code:
        old = code[code.index("zero=") :][:6]
        made = _exchange(strategy, found[0], f", {old}", "")
    else:
        made = _exchange(strategy, found[0], ", over", ", zero=2, over")
    assert made is not None
    return made[0], made[0].lines_of("replicate")


# Experts


@_violation
def _not_experts(strategy: Strategy, rng: Random) -> Found:
    axes = strategy.data_axes
    if not axes:
        return None
    codes = [f's.shard(where(), over="{axes[0]}")']
    if strategy.num_stages:
        codes.append(f's.shard(where(PP=0, EP=None), over="{axes[0]}")')
    return _insert(strategy, rng, *codes)


@_violation
def _experts_do_not_divide(strategy: Strategy, rng: Random) -> Found:
    odd = [a for a in strategy.sizes if strategy.spec.experts % strategy.sizes[a]]
    if "moe" not in strategy.spec.kinds or not odd or strategy.spec.random_experts:
        return None
    return _insert(strategy, rng, f's.shard(where(EP="*"), over={odd[0]!r})')


@_violation
def _random_experts(strategy: Strategy, rng: Random) -> Found:
    if "moe" not in strategy.spec.kinds or not strategy.spec.random_experts:
        return None
    if not strategy.sizes:
        return None
    return _insert(strategy, rng, f's.shard(where(EP="*"), over={_any_axis(strategy)!r})')


# Splits, cuts, recomputation


@_violation
def _does_not_divide(strategy: Strategy, rng: Random) -> Found:
    if strategy.lines_of("order"):
        return None
    found = _insert(strategy, rng, f's.split(where(), "ODD", {BATCH + 1})')
    assert found is not None
    return found[0], found[0].lines_of("split")


@_violation
def _bad_split(strategy: Strategy, rng: Random) -> Found:
    codes = ['s.split(where(), "ODD", 0)', 's.split(where(), "ODD", -1)', 's.split(where(), "ODD", 1.5)',
             's.split(where(), "ODD", "2")', "s.split(where(phase='F'), \"ODD\", 2)",
             's.split(where(), "phase", 2)']  # fmt: skip
    if strategy.num_stages:
        codes.append('s.split(where(), "PP", 2)')
    return _insert(strategy, rng, *codes)


@_violation
def _split_twice(strategy: Strategy, rng: Random) -> Found:
    splits = strategy.lines_of("split")
    if not splits:
        return None
    code = strategy.lines[splits[0]].code
    found = _insert(strategy, rng, code)
    assert found is not None
    (at,) = found[1]
    return found[0], (max(at, splits[0] + (at <= splits[0])),)


@_violation
def _bad_recompute(strategy: Strategy, rng: Random) -> Found:
    return _insert(
        strategy, rng, "s.recompute(where(phase='F'))", "s.recompute(where(), keep='all')"
    )


@_violation
def _bad_cut(strategy: Strategy, rng: Random) -> Found:
    """A tag that is taken, numbers that cannot be, and stages after what would name them."""
    cuts = strategy.lines_of("cut")
    if strategy.spec.tagged:
        return _insert(strategy, rng, 's.cut("PP", 2)')
    if not cuts:
        start = max(strategy.lines_of("mesh", "stream"), default=-1) + 1
        wrong = rng.choice(["0", "-1", "99", "'2'", "1.5"])
        lines = list(strategy.lines)
        made = strategy.with_lines([*lines[:start], line(f's.cut("PP", {wrong})'), *lines[start:]])
        return made, (start,)
    code = rng.choice(['s.split(where(), "X", 1)', "s.recompute(where())"])
    lines = list(strategy.lines)
    at = cuts[0]
    return strategy.with_lines([*lines[:at], line(code), *lines[at:]]), (at + 1,)


# Orders


@_violation
def _cyclic_order(strategy: Strategy, rng: Random) -> Found:
    found = _insert(strategy, rng, "s.order([where(phase='B'), where(phase='F')])", late=True)
    assert found is not None
    return found[0], found[0].lines_of("order") if strategy.lines_of("order") else found[1]


@_violation
def _in_two_groups(strategy: Strategy, rng: Random) -> Found:
    return _insert(
        strategy,
        rng,
        "s.order([where(phase='F'), where(phase='F')])",
        "s.order([[where(phase='F'), where(phase='F')], where(phase='B')])",
        late=False,
    )


@_violation
def _bad_groups(strategy: Strategy, rng: Random) -> Found:
    return _insert(
        strategy,
        rng,
        "s.order([where(phase='F')])",
        "s.order([])",
        "s.order([where(phase='F'), []])",
        "s.order('gpipe')",
        "s.order([where(phase='F'), 'B'])",
        "s.order([where(phase='F'), ['B']])",
        "s.order(3)",
        "s.order([where(phase='F'), 3])",
    )


@_violation
def _halved_and_whole(strategy: Strategy, rng: Random) -> Found:
    if strategy.lines_of("order"):
        return None
    return _insert(
        strategy,
        rng,
        "s.order([where(phase='BI'), where(phase='B')])",
        "s.order([where(phase='B'), where(phase='BW')])",
    )


@_violation
def _order_before_its_split(strategy: Strategy, rng: Random) -> Found:
    splits = strategy.lines_of("split")
    start = max(strategy.lines_of("mesh", "cut", "stream"), default=-1) + 1
    if not splits or strategy.lines_of("order"):
        return None
    tag, number = strategy.lines[splits[0]].code.split('"')[1::2][0], splits[0]
    code = f"s.order([where({tag}=0, phase='BI'), where({tag}=0, phase='BW')])"
    lines = list(strategy.lines)
    at = rng.randint(start, max(start, number))
    if at > number:
        return None
    return strategy.with_lines([*lines[:at], line(code), *lines[at:]]), (at,)


@_violation
def _bad_table(strategy: Strategy, rng: Random) -> Found:
    """A table for other numbers, another axis, another tag."""
    orders = strategy.lines_of("order")
    if not strategy.tables:
        return None
    more = rng.choice(
        [", axis='nowhere'", ", tag='QQ'", ", microbatch='QQ'", ", stages=[[0], [0]]"]
    )
    if more[2:].split("=")[0] in strategy.lines[orders[0]].code:
        return None
    return _exchange(strategy, orders[0], "s.order(table", f"s.order(table{more}")


@_violation
def _table_of_other_numbers(strategy: Strategy, rng: Random) -> Found:
    splits = strategy.lines_of("split")
    if not strategy.tables:
        return None
    lines = list(strategy.lines)
    index = rng.choice(splits)
    head, _, number = lines[index].code.rpartition(", ")
    lines[index] = replace(lines[index], code=f"{head}, {int(number[:-1]) + 1})")
    made = strategy.with_lines(lines)
    return made, made.lines_of("order")


@_violation
def _table_against_place(strategy: Strategy, rng: Random) -> Found:
    """Two stages exchange their slices."""
    places = strategy.lines_of("place")
    if not strategy.tables or "DIR" in strategy.source:
        return None
    axis = strategy.place_axes[0]
    at = {index: strategy.lines[index].code.split(f"mesh.at({axis}=")[1][0] for index in places}
    one = places[0]
    other = next((index for index in places if at[index] != at[one]), None)
    if other is None:
        return None
    lines = list(strategy.lines)
    for index, value in ((one, at[other]), (other, at[one])):
        head = lines[index].code.split("mesh.at(")[0]
        lines[index] = replace(lines[index], code=f"{head}mesh.at({axis}={value}))")
    made = strategy.with_lines(lines)
    return made, made.lines_of("order")
