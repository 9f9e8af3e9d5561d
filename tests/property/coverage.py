"""What random programs were made of: programs in, counts of distinct combinations out."""

from __future__ import annotations

from collections import Counter

from .programs import Strategy

Combination = tuple[str, ...]
COVERED: dict[str, Counter[Combination]] = {"legal": Counter(), "illegal": Counter()}


def combination(strategy: Strategy) -> Combination:
    """A program's directives, ZeRO levels, experts, stages, order and features of its model."""
    directives = {f"s.{line.kind}" for line in strategy.lines}
    features = {f"model {feature}" for feature in strategy.spec.features}
    return tuple(sorted({*directives, *strategy.facts, *features}))


def cover(what: str, strategy: Strategy, *more: str) -> None:
    COVERED[what][(*combination(strategy), *more)] += 1


def summary(covered: dict[str, Counter[Combination]]) -> list[str]:
    """Lines about all programs: how many, how many combinations, how often each part."""
    lines = []
    for what, combinations in covered.items():
        if not combinations:
            continue
        parts: Counter[str] = Counter()
        for combination, times in combinations.items():
            parts.update(dict.fromkeys(combination, times))
        total = combinations.total()
        lines.append(f"{what}: {total} programs, {len(combinations)} combinations")
        shown = [f"{part} {times}" for part, times in sorted(parts.items())]
        lines.append("    " + ", ".join(shown))
    return lines
