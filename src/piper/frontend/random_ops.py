"""Random operations: found in captured code, with the user's line."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from piper.errors import TraceError
from piper.frontend.capture import source_of

_NAMES = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "normal", "uniform_", "normal_", "bernoulli_", "exponential_", "random_",
}  # fmt: skip


def refuse_random(nodes: Iterable[fx.Node]) -> None:
    """Raise at the first operation whose result depends on a generator."""
    for node in nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in _NAMES and not _switched_off(node, str(name)):
            raise TraceError(
                f"{name} is random ({source_of(node)}), and randomness is not supported yet",
                legal="a model without dropout, or in eval mode",
            )


def _switched_off(node: fx.Node, name: str) -> bool:
    """Dropout with p = 0 or outside of training does nothing."""
    if "dropout" not in name:
        return False
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    return given.get("p", 0.5) == 0 or given.get("training", True) is False
