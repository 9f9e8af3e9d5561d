"""A cut after a split."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(pp=2)
    s.split(where(), "MB", 2)
    s.cut("STAGE", 2)
