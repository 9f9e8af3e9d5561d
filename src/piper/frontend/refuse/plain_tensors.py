"""Plain tensors: what a step reads, and is part of neither the model nor the batch, is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from piper.bodies.captured_nodes import source_of
from piper.errors import TraceError, is_users


def refuse_plain_tensor(node: fx.Node, tensor: Tensor, model: nn.Module) -> None:
    """Raise for an input of the captured graph: no strategy would know where it lies."""
    name = _attribute(tensor, model)
    source = next((found for user in node.users if (found := source_of(user))), None)
    place = f" ({source})" if source else ""
    if name:
        _, _, last = name.rpartition(".")
        raise TraceError(
            f"{name} is a tensor, and neither a parameter nor a buffer of the model{place}",
            legal=f'self.register_buffer("{last}", ..., persistent=False) in place of self.{last} = ...',
        )
    if name := _of_another(tensor):
        raise TraceError(
            f"{name} is not of the model that step is given{place}",
            legal="the model that make_model makes; a second one, such as a teacher, as a part of it",
        )
    name = _global(tensor) or node.name
    raise TraceError(
        f"{name} is a tensor, and neither a parameter, a buffer nor part of the batch{place}",
        legal="register it as a buffer of the model, put it into the batch, or make it in the step",
    )


def _global(tensor: Tensor) -> str:
    """What a file of the user's calls a tensor."""
    return next((name for name, value in _globals() if value is tensor), "")


def _of_another(tensor: Tensor) -> str:
    """The name of a tensor of a model that a file of the user's holds."""
    for name, value in _globals():
        if isinstance(value, nn.Module):
            for path, held in (*value.named_parameters(), *value.named_buffers()):
                if held is tensor:
                    return f"{name}.{path}"
    return ""


def _globals() -> Iterator[tuple[str, Any]]:
    for module in list(sys.modules.values()):
        if is_users(getattr(module, "__file__", None) or "<"):
            yield from list(vars(module).items())


def _attribute(tensor: Tensor, model: nn.Module) -> str:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if value is tensor:
                return f"{path}.{key}" if path else key
    return ""
