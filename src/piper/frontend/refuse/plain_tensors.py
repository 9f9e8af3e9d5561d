"""Plain tensors: what a step reads, and is part of neither the model nor the batch, is refused."""

from __future__ import annotations

import sys

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
    name = _global(tensor) or node.name
    raise TraceError(
        f"{name} is a tensor, and neither a parameter, a buffer nor part of the batch{place}",
        legal="register it as a buffer of the model, put it into the batch, or make it in the step",
    )


def _global(tensor: Tensor) -> str:
    """What a file of the user's calls a tensor."""
    for module in list(sys.modules.values()):
        if is_users(getattr(module, "__file__", None) or "<"):
            for name, value in vars(module).items():
                if value is tensor:
                    return name
    return ""


def _attribute(tensor: Tensor, model: nn.Module) -> str:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if value is tensor:
                return f"{path}.{key}" if path else key
    return ""
