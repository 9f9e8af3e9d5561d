"""bodies: a body is called with tensors of one type each time, and leaves such ones."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.ir.tensor_type import TensorType
from piper.plan.tasks import Calling

_Types = tuple[tuple[int, ...], tuple[int, ...]]


def bodies(world: World) -> Iterator[Problem]:
    """Runs of a body whose inputs or outputs have other shapes or dtypes than those of its first run."""
    known: dict[TensorType, int] = {}  # type -> its number
    first: dict[str, tuple[_Types, Party, int]] = {}
    for party in world.distinct:
        number = [known.setdefault(slot.type, len(known)) for slot in party.slots]
        type_of = number.__getitem__
        for index, task in enumerate(party.tasks):
            if isinstance(task, Calling):
                types = tuple(map(type_of, task.inputs)), tuple(map(type_of, task.outputs))
                wanted, other, at = first.setdefault(task.body, (types, party, index))
                if types != wanted:
                    text = (
                        f"{task.name} calls a body with other tensors than {other.tasks[at].name}"
                    )
                    yield problem(world, "bodies", text, (party, index), (other, at))
