"""The second place takes in what the first one placed."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2)
    s.place(where(PP=0), mesh.at(pp=0))
    s.place(where(PP="*"), mesh.at(pp=1))
