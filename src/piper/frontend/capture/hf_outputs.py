"""Hugging Face's extra outputs (router logits, hidden states): their hooks are there before the trace.

transformers installs them at the first call that asks for an output, behind a lock, which no trace
can hold. Until an output is asked for they do nothing.
"""

from __future__ import annotations

import sys

from torch import nn

_HOOKS = "transformers.utils.output_capturing"
_MODELS = "transformers.modeling_utils"


def install_output_hooks(model: nn.Module) -> None:
    """In every model of transformers' that this one is or has."""
    hooks, models = sys.modules.get(_HOOKS), sys.modules.get(_MODELS)
    if hooks is not None and models is not None:
        for module in model.modules():
            if isinstance(module, models.PreTrainedModel):
                hooks.maybe_install_capturing_hooks(module)
