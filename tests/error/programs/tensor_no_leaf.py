"""A sequence that the batch does not have."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(tp=2)
    s.shard_tensor(where(), over="tp", sequence={"tokens": 1})
