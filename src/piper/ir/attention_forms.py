"""Forms of attention over ranks that have parts of a sequence: their names, and what each moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Attention = Literal["gather", "heads", "ring"]
ATTENTION: tuple[Attention, ...] = get_args(Attention)


@dataclass(frozen=True)
class AttentionForm:
    """`gather`: each rank gets all keys and values. `heads`: each rank gets whole sequences of some
    heads, of which there are so many blocks, one for each rank of the axes that cut heads later.
    `ring`: keys and values go from rank to rank, and each attends to them as they come."""

    name: Attention = "gather"
    head_blocks: int = 1

    @property
    def deals_pairs(self) -> bool:
        """Whether a rank is better off with an early and a late part of sequences than with one part."""
        return self.name == "ring"


GATHER = AttentionForm()
