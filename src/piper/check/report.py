"""Report: what was proved of a plan, and what each class of ranks needs at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from piper.check.peak import Peak
from piper.ir.form.byte_sizes import show_size
from piper.plan.memory_ledger import CATEGORIES


@dataclass(frozen=True)
class Report:
    """Counts are over the parties that were checked: classes of a plan, or single ranks."""

    num_parties: int
    num_tasks: int
    num_messages: int
    num_collectives: int
    num_slots: int
    num_updates: int
    seconds: float
    peaks: tuple[Peak, ...]

    def __str__(self) -> str:
        head = (
            f"proved for {self.num_parties} classes: {self.num_tasks} tasks, "
            f"{self.num_messages} messages, {self.num_collectives} collectives, "
            f"{self.num_slots} slots, {self.num_updates} updates ({self.seconds:.2f} s)"
        )
        return f"{head}\n{self.memory()}"

    def memory(self) -> str:
        """The peak of each class of ranks as a table."""
        names = ("peak of a rank", "total", *CATEGORIES)
        rows = [names] + [
            (
                f"{peak.label} ({peak.num_ranks} ranks)",
                show_size(peak.total),
                *(show_size(peak.by_category[name]) for name in CATEGORIES),
            )
            for peak in self.peaks
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join(lines)
