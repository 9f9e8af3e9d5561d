"""Nobody says what the data ranks are for."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2, dp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
