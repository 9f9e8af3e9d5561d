"""What Dynamo lets through while a step is traced: recurrent layers, words that change nothing, and
what checkpointed code does beside its results, such as counting regions."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CHECKPOINTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"
# Methods of loggers that only speak; other packages add their own to the class (`warning_once`).
_METHODS = ["debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"]


@contextlib.contextmanager
def tracing_settings() -> Iterator[None]:
    """Loggers, prints and warnings say nothing: what they would print is on fake tensors. Checkpointed
    code is traced once and put in the place of its call, so that what it changes changes once."""
    config: Any = torch._dynamo.config
    silent = "ignore_logging_functions"
    if not hasattr(config, silent):  # torch 2.11
        silent = "ignore_logger_methods"
    spoken = getattr(config, silent) | _speaking()
    with config.patch({"allow_rnn": True, _CHECKPOINTS: True, silent: spoken}):
        yield


def _speaking() -> set[Callable[..., Any]]:
    of_class = vars(logging.Logger)
    added = [f for f in of_class.values() if getattr(f, "__module__", "logging") != "logging"]
    functions = [getattr(logging, name) for name in _METHODS if hasattr(logging, name)]
    return {*(of_class[name] for name in _METHODS), *added, *functions, print, warnings.warn}
