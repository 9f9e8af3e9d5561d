"""Hooks of a backward: refused where `make_model` registers them, since no plan would call them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn.modules import module as modules

from piper.errors import Source, TraceError, user_source

HOOKS = "no hooks of a backward: scale the loss, or clip with lower(clip=...)"
_OF_TENSORS = ("register_hook", "register_post_accumulate_grad_hook")
_OF_MODULES = (
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@contextlib.contextmanager
def refusing_hooks() -> Iterator[None]:
    """While a model is built: a hook is refused with the line that registers it."""
    with contextlib.ExitStack() as stack:
        for owner, names in ((Tensor, _OF_TENSORS), (nn.Module, _OF_MODULES)):
            for name in names:
                stack.enter_context(patch.object(owner, name, _refusal(name)))
        yield


def _refusal(name: str) -> Callable[..., Any]:
    def register(*args: Any, **kwargs: Any) -> None:
        raise TraceError(f"make_model calls {name} ({user_source()})", legal=HOOKS)

    return register


def refuse_hooks(model: nn.Module) -> None:
    """Raise for hooks of the model, or of all modules, that came by another way."""
    for what, tensor in model.named_parameters():
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            _refuse_any(f"parameter {what}", hooks)
    for path, module in model.named_modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            _refuse_any(f"module {path or type(module).__name__}", hooks)
    for hooks in (modules._global_backward_hooks, modules._global_backward_pre_hooks):
        _refuse_any("every module", hooks)


def _refuse_any(what: str, hooks: Mapping[int, Any] | None) -> None:
    for hook in (hooks or {}).values():
        code = getattr(inspect.unwrap(hook), "__code__", None)
        place = f" ({Source(code.co_filename, code.co_firstlineno)})" if code else ""
        raise TraceError(f"{what} has a hook for its backward{place}", legal=HOOKS)
