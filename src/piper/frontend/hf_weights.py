"""Hugging Face's files: stored tensors under the names of a file in, under a model's own out.

`from_pretrained` renames, stacks and joins what it reads. Its own rules do so here, with tensors that
have no elements. They are of transformers 5; older ones have none.
"""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

from torch import nn

from piper.errors import WeightsError
from piper.frontend.laid_out import InexpressibleError, LaidOut
from piper.stored.stored_pieces import Stored


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers' own kind."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def converted(model: Any, stored: Stored) -> Stored:
    """What `from_pretrained` would give the model, where its rules say more than the names."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:
        return stored
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    found: Stored = {}
    joined: dict[str, Any] = {}  # the first name of what a converter makes -> that converter
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own and name in own:
            renamed, pattern = name, None
        if pattern is None or renamed not in own:
            found[renamed if renamed in own else name] = stored[name]
            continue
        rule = joined.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
        rule.add_tensor(renamed, name, pattern, _LazyTensor(name, stored))
    for name, rule in joined.items():
        found |= _made(model, name, rule)
    return found


class _LazyTensor:
    """A tensor that a rule collects, and asks for when it begins."""

    def __init__(self, name: str, stored: Stored) -> None:
        self.name, self.stored = name, stored

    def __call__(self) -> LaidOut:
        return LaidOut(self.stored[self.name])


def _made(model: Any, name: str, rule: Any) -> Stored:
    operations = " and ".join(type(operation).__name__ for operation in rule.operations)
    sources = sorted(source for names in rule.layer_targets.values() for source in names)
    try:
        made = rule.convert(name, model=model, config=model.config)
    except Exception as problem:  # of transformers' operations, or of ours with their tensors
        what = f"needs {problem}" if isinstance(problem, InexpressibleError) else f"says: {problem}"
        raise WeightsError(
            f"{name} is made of {len(sources)} stored tensors by {operations}, which {what}",
            details=[*sources[:3], *(["..."] if len(sources) > 3 else [])],
            legal="model.from_pretrained(folder).save_pretrained(other, save_original_format=False), "
            "and the weights of that folder",
        ) from None
    tensors = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
    return {key: value.stored for key, value in tensors.items()}


def unneeded_names(model: Any) -> list[re.Pattern[str]]:
    """What may be in a file though the model has no such name."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        patterns.append(r"rotary_emb\.inv_freq")  # old files have one for each layer
    return [re.compile(pattern) for pattern in patterns]


def config_text(model: Any, dtype: str) -> str:
    """What `config.json` says of a model whose weights are saved in a dtype."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if dtype:
        config.dtype = dtype
    text: str = config.to_json_string()
    return text
