"""Six columns over four ranks."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(tp=4)
    s.shard_tensor(where(), over="tp", params={"first.weight": 0})
