"""A chunk whose bodies cannot be made in; one error with the user's line at fault out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from piper.bodies.captured_nodes import source_of
from piper.bodies.checkpoint_regions import CheckpointedRun
from piper.bodies.chunk_code import ChunkCode
from piper.bodies.cutting.joint import fake_inputs, on_device
from piper.bodies.failed_node import FailedNode, name_of, reason_of
from piper.bodies.leaves import tensors_in
from piper.errors import PiperError, TraceError


@contextlib.contextmanager
def blaming(code: ChunkCode, *, device: str) -> Iterator[None]:
    """While torch differentiates `code`: whatever it raises becomes a TraceError."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        raise _told(code, device, error) from error


def _told(code: ChunkCode, device: str, error: Exception) -> TraceError:
    run = _NodeByNode(code, device, error)
    inputs, mode = fake_inputs(code, device)
    try:
        with mode, torch.enable_grad(), torch.device(device):
            run.run(*inputs)
    except (FailedNode, _ChangedInPlace) as failed:
        return failed.told()
    except Exception:
        pass  # it is another failure than the one that is to be told
    sources = [source for node in code.graph.nodes if (source := source_of(node))]
    where = f" ({sources[0]} to {sources[-1]})" if sources else ""
    return TraceError(
        f"no backward can be made of a chunk's code{where}: {reason_of(error)}",
        legal="code that torch.compile(fullgraph=True) accepts, forward and backward",
    )


class _ChangedInPlace(Exception):
    def __init__(self, changer: fx.Node, saver: fx.Node) -> None:
        self.changer = changer
        self.saver = saver

    def told(self) -> TraceError:
        return TraceError(
            f"the backward of {name_of(self.saver)} ({source_of(self.saver)}) needs what "
            f"{name_of(self.changer)} changes in place ({source_of(self.changer)})",
            legal="a new tensor: x = x + y instead of x += y",
        )


class _NodeByNode(CheckpointedRun):
    """Runs code and, after each node, its backward, until something fails in the way of `error`."""

    def __init__(self, code: ChunkCode, device: str, error: Exception) -> None:
        root, graph = on_device(code, device)
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.error = error
        self.in_place = "inplace operation" in str(error)
        self.saved: list[tuple[fx.Node, Tensor, int]] = []  # for backwards, with their versions

    def run_node(self, n: fx.Node) -> Any:
        given = [t for arg in n.all_input_nodes for t in tensors_in(self.env[arg])]
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = super().run_node(n)
        except Exception as error:
            raise FailedNode(n, error) from error
        if self.in_place:
            self._refuse_changed(n)
            self.saved += [(n, tensor, tensor._version) for tensor in packed]
        else:
            self._try_backward(n, given, tensors_in(result))
        return result

    def _refuse_changed(self, node: fx.Node) -> None:
        for saver, tensor, version in self.saved:
            if tensor._version != version:
                raise _ChangedInPlace(node, saver)

    def _try_backward(self, node: fx.Node, given: list[Tensor], results: list[Tensor]) -> None:
        results = [tensor for tensor in results if tensor.requires_grad]
        inputs = [tensor for tensor in given if tensor.requires_grad]
        if not results or not inputs:
            return
        ones = [torch.ones_like(tensor) for tensor in results]
        try:
            torch.autograd.grad(results, inputs, ones, retain_graph=True, allow_unused=True)
        except Exception as error:
            if reason_of(error) == reason_of(self.error):
                raise FailedNode(node, error, backward=True) from error
