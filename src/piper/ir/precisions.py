"""Precision: what a user asks for in; the dtypes that parameters and their gradients have out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from piper.errors import PlanError, did_you_mean
from piper.ir.tensor_type import accumulation_dtype, dtype_bytes

DTYPES = ("float64", "float32", "bfloat16", "float16")
NARROW = ("bfloat16", "float16")
CHOICES = ("masters", "sums", "wire", "state")  # fields that parameter groups may have their own of


class Dtypes(NamedTuple):
    """What is kept for a parameter, and what its gradient passes through."""

    master: str
    sums: str
    wire: str
    state: str


class Precision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The dtypes of a training, by torch's names.

    `compute` is that of parameters and activations in the model's code ("": as the model is written).
    `masters` are what the optimizer steps: there are copies of parameters where theirs is another
    dtype. Gradients are added up over microbatches in `sums`, reduced over ranks in `wire`, and the
    optimizer keeps its `state` from step to step; its numbers, such as `step`, stay as torch has them.
    None is wide enough: float32, or float64 for parameters of that, for masters and sums; for the wire,
    as sums; for state, as masters.

    `groups` has other ones of the last four for some parameter groups, by label, or number as text:
    `groups={"head": {"wire": "float32"}}`. `float32_operators` says whether operators that autocast
    keeps in float32 stay so.
    """

    compute: str = ""
    float32_operators: bool = True
    masters: str | None = None
    sums: str | None = None
    wire: str | None = None
    state: str | None = None
    groups: dict[str, dict[str, str | None]] = {}

    def dtypes(self, dtype: str, names: Sequence[str] = ()) -> Dtypes:
        """Those of a parameter of a dtype, whose parameter group goes by these names."""
        own = next((self.groups[name] for name in names if name in self.groups), {})
        masters, sums, wire, state = (own.get(f, getattr(self, f)) for f in CHOICES)
        wide = accumulation_dtype(dtype)
        sums, masters = sums or wide, masters or wide
        return Dtypes(masters, sums, wire or sums, state or masters)

    @property
    def widens(self) -> bool:
        """Whether some operators compute in float32 where all else is narrower."""
        return self.float32_operators and self.compute in NARROW

    def __str__(self) -> str:
        """`bf16-wire`; or the fields that are chosen, `compute bfloat16, wire float32`."""
        for name, known in PRECISIONS.items():
            if self == known:
                return "as written" if name == "fp32" else name
        words = [_choices_text(self._chosen())] if self._chosen() else []
        words += [] if self.float32_operators else ["no float32 operators"]
        words += [f"group {name}: {_choices_text(own)}" for name, own in self.groups.items()]
        return ", ".join(words)

    def _chosen(self) -> dict[str, str | None]:
        own = {field: getattr(self, field) for field in ("compute", *CHOICES)}
        return {field: dtype for field, dtype in own.items() if dtype}


def _choices_text(choices: Mapping[str, str | None]) -> str:
    return ", ".join(f"{field} {dtype or 'wide enough'}" for field, dtype in choices.items())


_BF16 = Precision(
    compute="bfloat16", masters="float32", sums="float32", wire="float32", state="float32"
)
PRECISIONS = {
    "fp32": Precision(),  # as the model is written
    "bf16": _BF16,
    "bf16-wire": msgspec.structs.replace(_BF16, wire="bfloat16"),
    "bf16-pure": Precision(
        compute="bfloat16",
        float32_operators=False,
        masters="bfloat16",
        sums="bfloat16",
        wire="bfloat16",
        state="bfloat16",
    ),
}
LEGAL = f"{', '.join(PRECISIONS)}; a piper.Precision; or None as written"


def precision_of(given: Precision | str | None) -> Precision:
    """A precision by name or as an object; raises PlanError if there is none such."""
    if isinstance(given, Precision):
        problem = precision_problem(given)
        if problem:
            raise PlanError(f"precision: {problem}", legal=", ".join(DTYPES))
        return given
    name = "fp32" if given is None else given
    if not isinstance(name, str) or name not in PRECISIONS:
        near = did_you_mean(name, list(PRECISIONS)) if isinstance(name, str) else ""
        raise PlanError(f"precision={given!r}{near}", legal=LEGAL)
    return PRECISIONS[name]


def precision_problem(precision: Precision) -> str:
    """What no precision can have; '' if there is nothing."""
    if precision.compute != "" and precision.compute not in DTYPES:
        return f"compute={precision.compute!r} is no dtype to train in"
    for where, choices in (
        ("", {field: getattr(precision, field) for field in CHOICES}),
        *((f"groups[{name!r}]: ", own) for name, own in precision.groups.items()),
    ):
        if not isinstance(choices, Mapping):
            return f"{where}{choices!r}, not a dict of {', '.join(CHOICES)}"
        for field, dtype in choices.items():
            if field not in CHOICES:
                near = did_you_mean(str(field), CHOICES)
                return f"{where}{field!r}{near} is not one of {', '.join(CHOICES)}"
            if dtype is not None and dtype not in DTYPES:
                return f"{where}{field}={dtype!r} is no dtype to train in"
    return ""


def check_groups(precision: Precision, names: Sequence[Sequence[str]]) -> None:
    """Raise PlanError if a group of a precision is none of these parameter groups."""
    known = [name for each in names for name in each]
    for name in precision.groups:
        if name not in known:
            raise PlanError(
                f"precision: no parameter group is called {name!r}{did_you_mean(name, known)}",
                legal=", ".join(dict.fromkeys(known)),
            )


def dtypes_problem(dtype: str, dtypes: Dtypes) -> str:
    """Why a parameter of a dtype cannot be trained so; '' if it can."""
    if dtypes.master != dtype and dtype_bytes(dtypes.master) <= dtype_bytes(dtype):
        return f"is {dtype}, and has masters of {dtypes.master}, which are no wider"
    return ""
