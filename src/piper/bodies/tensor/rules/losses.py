"""Rules of cross entropy: by rows, or by vocabulary in two steps with one gather between them."""

from __future__ import annotations

from torch import Tensor, fx

from piper.bodies.tensor.rules.product_rules import own_index
from piper.bodies.tensor.rules.rule_table import Answer, Ask, Emitter, aten, rule
from piper.ir.layouts import PARTIAL, REPLICATED, Split

NONE, MEAN, SUM = 0, 1, 2  # aten's numbers of reductions


@rule("cross_entropy_loss")
def cross_entropy(ask: Ask) -> Answer:
    """Rows apart: each its loss, or the sum over the rank's rows. Means are written as quotients."""
    logits = ask.summed()[0]
    weighted, rows = len(ask.args) != 2, len(ask.shape(0)) == 2
    if not isinstance(logits, Split) or logits.dim != 0 or weighted or not rows:
        return ask.all_replicated("it needs the classes whole, in rows without weights")
    if ask.given["reduction"] == MEAN:
        return ask.all_replicated("a mean over rows counts those of all ranks")
    made = PARTIAL if ask.given["reduction"] == SUM else logits
    return Answer([logits, logits], made)


def vocabulary_terms(logits: Tensor, target: Tensor) -> Tensor:
    """Stands in a graph for the terms [2 * ranks, rows] of a cross entropy over a split vocabulary."""
    raise NotImplementedError


def vocabulary_loss(terms: Tensor, target: Tensor, ignored: int, reduction: int) -> Tensor:
    """Stands in a graph for the loss that all ranks' terms give."""
    raise NotImplementedError


@rule("vocabulary_terms")
def terms_rule(ask: Ask) -> Answer:
    rows = ask.shape(0)[1] // ask.size

    def terms(to: Emitter, args: list[fx.Node]) -> fx.Node:
        """Per row the logarithm of the sum over the rank's classes, and the target's logit or 0."""
        total = to.call(aten.logsumexp.default, args[0], [1])
        own, here = own_index(to, args[1], rows)
        column = to.call(aten.unsqueeze.default, own, 1)
        logit = to.call(aten.squeeze.dim, to.call(aten.gather.default, args[0], 1, column), 1)
        # Not times 0: classes may be masked by -inf.
        return to.call(
            aten.stack.default, [total, to.call(aten.where.ScalarOther, here, logit, 0.0)]
        )

    return Answer([Split(1), REPLICATED], Split(0), terms)


@rule("vocabulary_loss")
def loss_rule(ask: Ask) -> Answer:
    """No maxima are exchanged, and backward there is nothing to communicate."""
    ignored, reduction = ask.node.args[2:4]
    size, rows = ask.size, ask.shape(1)[0]

    def loss(to: Emitter, args: list[fx.Node]) -> fx.Node:
        terms = to.call(aten.view.default, args[0], [size, 2, rows])
        total = to.call(aten.logsumexp.default, to.call(aten.select.int, terms, 1, 0), [0])
        logit = to.call(aten.sum.dim_IntList, to.call(aten.select.int, terms, 1, 1), [0])
        counted = to.call(aten.ne.Scalar, args[1], ignored)
        each = to.call(aten.sub.Tensor, total, logit)
        each = to.call(aten.where.ScalarOther, counted, each, 0.0)
        if reduction == NONE:
            return each
        in_all = to.call(aten.sum.default, each)
        if reduction == SUM:
            return in_all
        return to.call(aten.div.Tensor, in_all, to.call(aten.sum.default, counted))

    return Answer([REPLICATED, REPLICATED], REPLICATED, loss)
