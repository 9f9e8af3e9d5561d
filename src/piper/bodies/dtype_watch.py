"""DtypeWatch: operators on fake tensors in; an error for dtypes that only fake ones take, out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Which arguments must have one dtype. torch 2.13 does not look at them where tensors are fake.
_ALIKE = {
    _aten.mm: (0, 1),
    _aten.mv: (0, 1),
    _aten.addmm: (0, 1, 2),
    _aten.addmv: (0, 1, 2),
    _aten.index_put: (0, 2),
    _aten.index_put_: (0, 2),
    _aten.index_add: (0, 3),
    _aten.index_add_: (0, 3),
    _aten.binary_cross_entropy: (0, 1),
}
_CLASSES = {_aten.nll_loss_forward: 1, _aten.nll_loss2d_forward: 1}  # argument that numbers classes
_NUMBERS = (torch.int64, torch.uint8)


class WrongDtypes(RuntimeError):
    """What an operator was given, and what it takes."""

    def __init__(self, given: str, legal: str) -> None:
        self.legal = legal
        super().__init__(given)


class DtypeWatch(TorchDispatchMode):
    """Raises WrongDtypes for a call that would fail on real tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func.overloadpacket
        if operator in _ALIKE:
            _check_alike([args[at] for at in _ALIKE[operator] if at < len(args)])
        if operator in _CLASSES and args[_CLASSES[operator]].dtype not in _NUMBERS:
            given = _name(args[_CLASSES[operator]].dtype)
            raise WrongDtypes(f"classes of {given}", "classes of int64: labels.long()")
        return func(*args, **(kwargs or {}))


def _check_alike(given: list[Any]) -> None:
    dtypes = [arg.dtype for arg in given if isinstance(arg, Tensor)]
    if len(set(dtypes)) > 1:
        names = " and ".join(map(_name, dict.fromkeys(dtypes)))
        legal = "one dtype: that of the parameters, such as x.float(), in the batch or in the model"
        raise WrongDtypes(names, legal)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
