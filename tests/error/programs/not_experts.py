"""A region that is not made of experts."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(ep=2)
    s.replicate(where(PP=1), over="ep")
    s.shard(where(PP=0), over="ep")
