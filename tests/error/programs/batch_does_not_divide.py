"""Eight samples in three microbatches."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.split(where(), "MB", 3)
