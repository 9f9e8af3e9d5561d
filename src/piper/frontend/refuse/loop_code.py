"""Code of a training loop in a model or a step in; an error with where Piper does it out."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any
from unittest.mock import patch

from torch import fx
from torch.nn.parallel import DataParallel, DistributedDataParallel

from piper.bodies.captured_nodes import callee, source_of
from piper.errors import Call, Source, TraceError, user_source
from piper.frontend.refuse.ways_out import NO_COMMUNICATION, NO_WRAPPER

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_COLLECTIVES = "_c10d_functional."


@contextlib.contextmanager
def refusing_wrappers() -> Iterator[None]:
    """While a model is built: what would replicate or cut it a second time is refused."""
    kinds: list[type] = [DataParallel, DistributedDataParallel]
    if _FSDP in sys.modules:
        kinds.append(sys.modules[_FSDP].FullyShardedDataParallel)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TraceError(
            f"make_model wraps the model in {type(self).__name__} ({user_source()})",
            legal=NO_WRAPPER,
        )

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "__init__", refuse))
        yield


def refuse_clipping(step: Any, call: Call) -> None:
    """Raise for a step that clips: it has no gradients yet, so that nothing would be clipped."""
    code = getattr(step, "__code__", None)
    for name, source in _clips(code) if code is not None else ():
        raise TraceError(
            f"{call.name} calls {name} ({source}), when there are no gradients yet",
            legal="lower(clip=1.0): every step clips by the norm of all gradients",
        )


def _clips(code: CodeType) -> Iterator[tuple[str, Source]]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval in _CLIPS:
            yield instruction.argval, Source(code.co_filename, line)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _clips(inner)


def refuse_collectives(graph: fx.Graph) -> None:
    """Raise for communication that the user's code asks for: which ranks run it, a strategy decides."""
    for node in graph.nodes:
        if str(node.target).startswith(_COLLECTIVES):
            raise TraceError(
                f"{callee(node)} communicates ({source_of(node)})", legal=NO_COMMUNICATION
            )
