"""Calls in a body: an operator and its arguments in; refused unless they fit its signature."""

from __future__ import annotations

import inspect
import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piper.bodies.files.body_values import refuse, shortened

_NUMBER = (bool, int, float, complex)
# Kinds of a schema's types, and the Python values that they take; a result of a call may be any of them.
_TAKES: dict[str, tuple[type, ...]] = {
    "TensorType": _NUMBER,  # torch makes a tensor of a number
    "NumberType": _NUMBER,
    "ComplexType": _NUMBER,
    "FloatType": (bool, int, float),
    "IntType": (bool, int),
    "SymIntType": (bool, int),
    "BoolType": (bool,),
    "SymBoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
    "ScalarTypeType": (torch.dtype,),
    "LayoutType": (torch.layout,),
    "MemoryFormatType": (torch.memory_format,),
}


# Backwards of attention take None for these tensors, though their schemas do not say so.
_ATTENTION = re.compile(r"aten\._scaled_dot_product_\w+_attention_backward\.default")
_MAY_BE_NONE = ("attn_bias", "cum_seq_q", "cum_seq_k")


def check_call(
    name: str, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Names of arguments are those of the operator, and values are of their types."""
    if isinstance(target, torch._ops.OpOverload):
        _check_schema(name, target._schema.arguments, args, kwargs)
        return
    try:
        inspect.signature(target).bind(*args)
    except (TypeError, ValueError):
        refuse(f"{name} takes other arguments than {shortened(list(args))}")
    if kwargs:
        refuse(f"{name} takes no argument by name")
    if target is operator.getitem and not (isinstance(args[0], fx.Node) and type(args[1]) is int):
        refuse(f"{name} takes a number of a result, not {shortened(list(args))}")


def _check_schema(
    name: str, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        refuse(f"{name} takes {len(positional)} arguments, not {len(args)}")
    given = dict(zip((argument.name for argument in positional), args, strict=False))
    known = {argument.name: argument for argument in arguments}
    for key, value in kwargs.items():
        if key not in known or key in given or keyword.iskeyword(key):
            refuse(f"{name} takes no argument {shortened(key)}")
        given[key] = value
    for argument in arguments:
        if argument.name in given:
            absent = given[argument.name] is None and argument.name in _MAY_BE_NONE
            if absent and _ATTENTION.fullmatch(name):
                continue
            if not _fits(given[argument.name], argument.real_type, argument.N):
                value = shortened(given[argument.name])
                refuse(f"{argument.name} of {name} is {value}, not {argument.real_type}")
        elif not argument.has_default_value():
            refuse(f"{name} is called without {argument.name}")


def _fits(value: Any, kind: Any, length: int | None) -> bool:
    if isinstance(value, fx.Node):
        return True
    match kind.kind():
        case "OptionalType":
            return value is None or _fits(value, kind.getElementType(), length)
        case "ListType":
            inner = kind.getElementType()
            if isinstance(value, list | tuple):
                return all(_fits(item, inner, None) for item in value)
            return length is not None and _fits(value, inner, None)  # int[2] takes one for both
        case known:
            return isinstance(value, _TAKES.get(known, ()))
