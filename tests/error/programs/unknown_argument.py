"""An argument that a directive does not take."""

from _model import batch, model, step  # noqa: F401

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(dp=2)
    s.replicate(where(), over="dp", bucket="25MiB")  # type: ignore[call-arg]
