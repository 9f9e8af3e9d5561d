"""A form of attention over parts of a sequence, where no sequence is cut."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(cp=2)
    s.shard_tensor(where(), over="cp", params={}, attention="heads")
