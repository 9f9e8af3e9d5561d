"""An axis that the mesh does not have."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(dp=2)
    s.replicate(where(), over="data")
