"""A parameter that does not exist is to be cut."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(tp=2)
    s.shard_tensor(where(), over="tp", params={"first.weigth": 0})
