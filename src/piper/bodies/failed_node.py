"""FailedNode: captured code that does not run, or has no backward, as an error for the user."""

from __future__ import annotations

from torch import fx

from piper.bodies.captured_nodes import callee, source_of
from piper.bodies.dtype_watch import WrongDtypes
from piper.errors import TraceError

_NAMES = {"autograd_function_apply": "autograd.Function"}
_NO_BACKWARD = (
    "operators that have a backward (autograd.Function, torch.library.register_autograd), "
    "or x.detach() where no gradient is meant"
)


class FailedNode(Exception):
    """A node that does not run on inputs of these shapes; with `backward`, its backward does not."""

    def __init__(self, node: fx.Node, cause: Exception, *, backward: bool = False) -> None:
        self.node = node
        self.cause = cause
        self.backward = backward
        super().__init__(str(cause))

    def told(self) -> TraceError:
        place = f"({source_of(self.node)}): {reason_of(self.cause)}"
        name = name_of(self.node)
        if isinstance(self.cause, WrongDtypes):
            place = f"({source_of(self.node)})"
            return TraceError(f"{name} is given {self.cause} {place}", legal=self.cause.legal)
        if self.backward:
            return TraceError(f"the backward of {name} fails {place}", legal=_NO_BACKWARD)
        return TraceError(
            f"{name} fails on fake tensors {place}",
            legal="operators that know the shapes of their results (torch.library.register_fake)",
        )


def name_of(node: fx.Node) -> str:
    """What the user's code called, in the user's words."""
    return _NAMES.get(callee(node), callee(node))


def reason_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
