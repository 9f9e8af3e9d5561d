"""A backward cannot be run as a whole and in halves."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(dp=2)
    s.order([where(phase="B"), where(phase="BW")])
    s.replicate(where(phase="B"), over="dp")
