"""Four experts over three ranks."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(ep=3)
    s.replicate(where(EP=None), over="ep")
    s.shard(where(EP="*"), over="ep")
