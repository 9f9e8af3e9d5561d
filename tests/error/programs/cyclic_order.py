"""The backward of a stage before its forward."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.split(where(), "MB", 2)
    s.order([where(PP=1, EP=None, MB=0, phase="B"), where(PP=1, EP=None, MB=0, phase="F")])
