"""Captures: a program and a number of rows in; its capture there, recorded as rarely as can be, out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from piper.bodies.failed_node import FailedNode
from piper.errors import TraceError
from piper.frontend.capture.alignment import same_nodes
from piper.frontend.capture.capture import Capture, Recording, Step, finish, record
from piper.ir.tensor_type import TensorType

if TYPE_CHECKING:
    from torch import nn


class Captures:
    """One recording with a symbolic number of rows serves all numbers that it holds for.

    Code that looks at the number may not allow that: then it is recorded at each number by itself.
    Those in eval() mode are the ones of training (`trained`), unless its code looks at the mode.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        batch: Any,
        step: Step,
        *,
        batch_size: int,
        dtype: str,
        training: bool,
        frozen: frozenset[str],
        float32_operators: bool = False,
        trained: Captures | None = None,
    ) -> None:
        self.make_model = make_model
        self.batch = batch
        self.step = step
        self.batch_size = batch_size
        self.dtype = dtype
        self.float32_operators = float32_operators
        self.training = training
        self.frozen = frozen
        self.trained = trained
        self._by_rows: dict[int, Capture] = {}
        self._open: Recording | None = None  # with a symbolic number of rows
        self._tried = False

    def at(self, rows: int) -> Capture:
        """The uncut program for batches of `rows` samples; nodes have the same names at any number."""
        if rows not in self._by_rows:
            self._by_rows[rows] = (
                self._of_training(rows) or self._derived(rows) or self._recorded(rows)
            )
        return self._by_rows[rows]

    def types_at(self, rows: int) -> dict[str, TensorType] | None:
        """The types of all results at a number of rows, if the one recording knows them."""
        if self.trained is not None and self.at(self.batch_size).any_mode:
            return self.trained.types_at(rows)
        self.at(self.batch_size)
        if self._open is None or self._open.rows is None or not self._open.holds_at(rows):
            return None
        return self._open.types_at(rows)

    def _of_training(self, rows: int) -> Capture | None:
        capture = None if self.trained is None else self.trained.at(rows)
        return capture.without_gradient() if capture is not None and capture.any_mode else None

    def _derived(self, rows: int) -> Capture | None:
        """By the one recording, if it holds for so many rows."""
        if not self._tried:
            self._tried = True
            try:
                self._open = self._record(self.batch_size, any_rows=self.batch_size > 1)
            except TraceError:  # without a symbol it may work; else that says why not
                return None
        if self._open is None or not self._open.holds_at(rows):
            return None
        try:
            return finish(self._open, rows)
        except TraceError:
            raise
        except Exception:  # operators that refuse these shapes: recorded there, it says where
            return None

    def _recorded(self, rows: int) -> Capture:
        recording = self._record(rows, any_rows=False)
        try:
            capture = finish(recording, rows)
        except FailedNode as failed:
            raise failed.told() from failed
        if rows != self.batch_size:
            rename(capture, self.at(self.batch_size))
        return capture

    def _record(self, rows: int, *, any_rows: bool) -> Recording:
        """Products that meet tensors of several dtypes refuse them before casts are put in: such a step
        is recorded under torch's autocast."""
        try:
            return self._record_by_itself(rows, any_rows=any_rows)
        except TraceError:
            if not self.float32_operators:
                raise
            with contextlib.suppress(TraceError):
                return self._record_by_itself(rows, any_rows=any_rows, autocast=True)
            raise

    def _record_by_itself(self, rows: int, *, any_rows: bool, autocast: bool = False) -> Recording:
        return record(
            self.make_model,
            self.batch,
            self.step,
            rows=rows,
            any_rows=any_rows,
            dtype=self.dtype,
            float32_operators=self.float32_operators,
            training=self.training,
            frozen=self.frozen,
            autocast=autocast,
        )


def rename(capture: Capture, whole: Capture) -> None:
    """Give what is the same code the same names: Values are known by name."""
    names = {mine: theirs.name for mine, theirs in same_nodes(capture.graph, whole.graph)}
    taken = set(names.values())
    for node in capture.graph.nodes:
        name = names.get(node, node.name)
        while node not in names and name in taken:
            name = f"{name}_"
        taken.add(name)
        node.name = name
