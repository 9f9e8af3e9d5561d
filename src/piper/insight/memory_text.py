"""Memory text: the peak of a rank's memory and what would lower it in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.insight.causes import Causes
from piper.insight.memory_peak import MemoryPeak
from piper.insight.memory_remedies import Remedy
from piper.ir.form.byte_sizes import show_size


def peak_text(causes: Causes, peak: MemoryPeak) -> Iterator[str]:
    at = (peak.time - causes.begin) * 1e3
    yield f"{peak.track} holds most at {at:.3f} ms, as {peak.task} starts: {show_size(peak.nbytes)}"
    for name, nbytes in sorted(peak.by_category.items(), key=lambda item: -item[1]):
        yield f"  {show_size(nbytes):>10}  {nbytes / peak.nbytes:6.1%}  {name}"
    yield "largest of them:"
    wide = max((len(alive.name) for alive in peak.largest), default=0)
    for alive in peak.largest:
        maker = (
            f"from {alive.task} ({alive.directive})" if alive.task else "stays from step to step"
        )
        yield f"  {show_size(alive.nbytes):>10}  {alive.name:<{wide}}  {alive.category}, {maker}"


def remedies_text(remedies: Sequence[Remedy]) -> Iterator[str]:
    if not remedies:
        yield "no directive is known that would lower it"
        return
    if not remedies[0].tried:
        yield "what could lower it, at most (with FILE.py and its options each is tried):"
        for remedy in remedies:
            yield f"  {show_size(remedy.saves):>10}  {remedy.directives[0]}"
        return
    yield "tried, each alone, and lowered to a plan:"
    for remedy in remedies:
        if remedy.refused:
            yield f"  {'refused':>10}  {'; '.join(remedy.directives)}: {remedy.refused}"
            continue
        sign = "-" if remedy.saves >= 0 else "+"
        change = sign + show_size(abs(remedy.saves))
        to = f"to {show_size(remedy.peak)}"
        yield f"  {change:>10}  {to:<13}  {'; '.join(remedy.directives)}"
