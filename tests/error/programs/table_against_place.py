"""The table runs stage 0 on rank 0, the strategy places it on rank 1."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    import piper

    mesh = s.mesh(pp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=1 - stage))
    s.split(where(), "MB", 2)
    s.order(piper.schedules.gpipe(num_ranks=2, num_microbatches=2))
