"""Five microbatches do not make two equal rounds on two ranks."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    import piper

    mesh = s.mesh(pp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.split(where(), "MB", 5)
    s.order(piper.schedules.interleaved_1f1b(num_ranks=2, num_microbatches=5))
