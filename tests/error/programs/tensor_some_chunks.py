"""An axis shares tensors in one stage, and the batch in the other."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(tp=2)
    s.shard_tensor(where(PP=0), over="tp", params={"first.weight": 0})
    s.replicate(where(PP=1), over="tp")
