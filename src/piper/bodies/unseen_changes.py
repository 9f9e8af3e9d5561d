"""Changes in place that no version counter shows: a call on fake tensors in, what it changes out.

The statistics of a batch norm are the known case: its operator does not say that it writes them, and on
fake tensors it does not. Functionalization knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import has_data_mutation, to_fun
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree


class UnseenChanges:
    """Asks once for equal calls: the layers of a model are alike."""

    def __init__(self) -> None:
        self._changed: dict[Any, list[int]] = {}

    def changed(self, node: fx.Node, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors among the arguments that the node's call changes."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (node.op, node.target, str(structure), tuple(map(_alike, leaves)))
        if key not in self._changed:
            self._changed[key] = _positions(_call_of(node), leaves, structure)
        return [leaves[i] for i in self._changed[key]]


def _alike(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.requires_grad
    return type(leaf), repr(leaf)


def _call_of(node: fx.Node) -> Callable[..., Any]:
    target = node.target
    if isinstance(target, str):
        return lambda value, *args, **kwargs: getattr(value, target)(*args, **kwargs)
    return target


def _positions(call: Callable[..., Any], leaves: list[Any], structure: Any) -> list[int]:
    with enable_python_dispatcher(), FunctionalTensorMode():
        wrapped = [to_fun(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(wrapped, structure)
        try:
            call(*args, **kwargs)
        except (
            Exception
        ):  # not every call has a functional form; what is live is checked again later
            return []
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return [i for i in tensors if has_data_mutation(wrapped[i])]
