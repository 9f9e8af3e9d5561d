"""A cut of a model that has stages."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule


def strategy(s: Schedule) -> None:
    s.mesh(pp=2)
    s.cut("PP", 2)
