"""The experts are both copied and split along dp."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(dp=2)
    s.replicate(where(), over="dp")
    s.shard(where(EP="*"), over="dp")
