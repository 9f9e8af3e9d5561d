"""Replaced buffers: `self.mean = 0.9 * self.mean + x` in traced code in, a change of the buffer out.

Dynamo keeps the assignment to itself and goes on with the new tensor. Torch's own hook for buffers sees
it, and leaves a note in the graph; at the end the buffer gets the content of what has replaced it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from piper.bodies.captured_nodes import source_of, value_of
from piper.errors import TraceError

_library = torch.library.Library("piper", "FRAGMENT")
_library.define("replace_buffer(Tensor old, Tensor new) -> ()")


def _nothing(old: Tensor, new: Tensor) -> None:
    return None


_library.impl("replace_buffer", _nothing, "CompositeExplicitAutograd")


@contextlib.contextmanager
def noting_replacements() -> Iterator[None]:
    """While Dynamo traces."""
    handle = register_module_buffer_registration_hook(_note)
    try:
        yield
    finally:
        handle.remove()


def _note(module: nn.Module, name: str, buffer: Tensor) -> None:
    old = module._buffers.get(name)
    if old is not None and buffer is not None:
        torch.ops.piper.replace_buffer(old, buffer)


def store_replacements(graph: fx.Graph) -> None:
    """Exchange the notes for changes in place, after all other code."""
    stands_for: dict[fx.Node, fx.Node] = {}  # what has replaced a buffer -> the buffer
    last: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # buffer -> what it is at the end, the note
    for note in graph.find_nodes(op="call_function", target=torch.ops.piper.replace_buffer):
        old, new = note.args
        assert isinstance(old, fx.Node) and isinstance(new, fx.Node)
        buffer = stands_for[new] = stands_for.get(old, old)
        last[buffer] = new, note
    for buffer, (new, note) in last.items():
        if _same_memory(buffer, new):
            continue  # it was put back, or `.to()` had nothing to do
        _check_alike(buffer, new, note)
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            content = graph.call_method("detach", (new,))
            change = graph.call_method("copy_", (buffer, content))
        for made in (content, change):
            made.meta = {**note.meta, "example_value": value_of(buffer)}
    for note in graph.find_nodes(op="call_function", target=torch.ops.piper.replace_buffer):
        graph.erase_node(note)


def _same_memory(buffer: fx.Node, new: fx.Node) -> bool:
    one, other = value_of(buffer), value_of(new)
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )


def _check_alike(buffer: fx.Node, new: fx.Node, note: fx.Node) -> None:
    one, other = value_of(buffer), value_of(new)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise TraceError(
            f"a buffer is replaced by a tensor of another shape or dtype ({source_of(note)})",
            details=[f"{one.dtype}{list(one.shape)} by {other.dtype}{list(other.shape)}"],
            legal="buffers that keep their shape and dtype",
        )
