"""A table in which two ranks wait for each other."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule
from piper.schedules import from_rows
from piper.strategies import parallel


def strategy(s: Schedule) -> None:
    table = from_rows(["0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"], name="mine")
    parallel(pp=2, schedule=table, microbatches=2)(s)
