"""There is no third stage."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2)
    s.place(where(PP=2), mesh.at(pp=0))
