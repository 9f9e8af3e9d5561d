"""No backward is whole behind an order that names halves."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(dp=2)
    s.replicate(where(phase="F"), over="dp")
    s.order([where(phase="BI"), where(phase="BW")])
    s.replicate(where(phase="B"), over="dp")
