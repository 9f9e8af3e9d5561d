"""Rules of operators against numbers: local code on parts, put together, is the operator itself."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from piper.bodies.random.keyed import Keyed
from piper.bodies.tensor import part_ops as part_ops
from piper.bodies.tensor.forward_code import forward_code
from piper.bodies.tensor.parts import dealt_blocks
from piper.bodies.tensor.rules.rule_table import Answer, Ask, operator_name, rule_of, tensor_args
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Split, divides
from tests.tensor_models import language_model_chunk, llama_chunk, random_inputs
from tests.tensor_ranks import part, whole_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def test_operators_of_a_fused_model_with_dropout() -> None:
    found = _checked(language_model_chunk(layers=1, fused=True, bias=True, dropout=0.3))
    assert {"linear", "layer_norm", "split", "keyed_mask", "embedding"} <= found.keys()


def test_operators_of_llama() -> None:
    found = _checked(llama_chunk())
    assert {"linear", "scaled_dot_product_attention", "silu", "cat", "slice"} <= found.keys()


X = (4, 8, 12)


def _moves(x: Tensor) -> Any:
    return (
        x.transpose(0, 1), x.permute(2, 0, 1), x.movedim(0, 2), x.unsqueeze(1), x.mT,
        x[..., None].squeeze(-1), x.view(4, 2, 4, 12), x.flatten(0, 1),
        x.unsqueeze(0).expand(2, 4, 8, 12), x.repeat_interleave(2, 1), x.flatten(0, 1).t(),
    )  # fmt: skip


def _takes(x: Tensor) -> Any:
    return (
        x[:, :4], x[:, 2:6], x[1], x[:, 1], *x.unbind(0), *x.split(4, 2), *x.split([2, 6], 1),
        torch.cat([x, x], 1), torch.cat([x, x * 2], -1), torch.stack([x, x], 1),
        x.chunk(2, 1)[1],
    )  # fmt: skip


def _reduces(x: Tensor) -> Any:
    return (
        x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.mean(), x.mean(-1, keepdim=True),
        x.amax(1), x.amin((0, 1)), x.logsumexp(1), x.argmax(1), x.max(1).values, x.var(1),
        (x > 0).any(1), x.cumsum(1), x.softmax(-1), x.log_softmax(1), x.topk(2, 1).values,
        x.sort(1).values, F.layer_norm(x, (12,)), F.rms_norm(x, (8, 12)),
    )  # fmt: skip


def _elements(x: Tensor) -> Any:
    y = x[:, :1]
    return (
        x + y, x - 2, y * x, x / 3, -x, torch.where(x > 0, x, y), x.masked_fill(x > 0, 0.0),
        F.gelu(x), x.clone(), torch.maximum(x, y), x.float(), torch.zeros_like(x), x * x.sum(),
        x / x.sum(), x + x[0, 0], torch.max(x, y),
    )  # fmt: skip


def _indexes(x: Tensor) -> Any:
    index = (x * 100).long().abs() % 4
    return (
        x.gather(1, index), torch.zeros_like(x).scatter(1, index, x),
        torch.zeros_like(x).scatter_add(2, index, x), x.index_select(1, index[0, 0]),
        torch.slice_scatter(x, x[:, :2] * 2, 1, 0, 2), F.embedding(index[0], x[0]),
        x.new_zeros(3),
    )  # fmt: skip


def _products(x: Tensor) -> Any:
    y, matrix = x.mT, x[0]
    return (
        x @ y, x @ matrix.t(), matrix @ matrix.t(), torch.bmm(x, y), F.linear(x, matrix),
        x @ y[0], x @ x[0, 0], F.linear(x, matrix, x[0, :, 0]),
        torch.addmm(x[0, 0, :8], matrix, matrix.t()),
    )  # fmt: skip


def _sums(x: Tensor) -> Any:
    y, matrix = x * 2, x[0]
    return (
        torch.einsum("abc,dbc->ad", x, y), torch.einsum("abc,bc->ab", x, matrix),
        torch.einsum("abc,dc->abd", x, matrix), torch.einsum("abc->b", x),
        torch.einsum("abc,abc->abc", x, y),
    )  # fmt: skip


def _attends(x: Tensor) -> Any:
    q, k = x.view(2, 2, 8, 12), x.view(2, 2, 8, 12) * 2
    mask = (x[0, :, :8] > -0.5).logical_or(torch.eye(8, dtype=torch.bool))
    attend = F.scaled_dot_product_attention
    return attend(q, k, q), attend(q, k, q, is_causal=True), attend(q, k, q, mask), attend(x, x, x)


def _experts(x: Tensor) -> Any:
    rows, weight, counts = x.flatten(0, 1), x.mT, torch.tensor([5, 0, 20, 7])
    order = (rows[:, 0] * 100).long().argsort()
    return (
        torch.ops.piper.grouped_mm(rows, weight, counts),
        torch.ops.piper.put_rows(rows, order),
        torch.ops.piper.take_rows(rows[:8], rows[:16, 0].argsort(), 2),
        *torch.ops.piper.sort_experts((rows[:, 0] * 100).long().abs() % 4, 4),
        rows[:, ::2], rows[:, 1::3],
    )  # fmt: skip


def _losses(x: Tensor) -> Any:
    target = (x[:, :, 0] * 100).long().abs() % 12
    target = torch.where(target == 3, -100, target)
    rows = x.flatten(0, 1)
    return tuple(F.cross_entropy(rows, target.flatten(), reduction=r) for r in ("none", "sum"))


@pytest.mark.parametrize(
    "code",
    [_moves, _takes, _reduces, _elements, _indexes, _products, _sums, _attends, _experts, _losses],
)
def test_operators(code: Callable[[Tensor], Any]) -> None:
    x = torch.randn(X, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = make_fx(code, pre_dispatch=True)(x)
    found = Counter[str]()
    _check_module(module, [x], found, 2)
    assert found.total() > 5


@pytest.mark.parametrize(
    "split",
    [Split(0), Split(1), Split(1, 2), Split(1, 2, mirrored=True), Split(2, (2, 4)), Split(2, 3)],
)
def test_a_part_of_a_mask_is_a_part_of_the_mask(split: Split) -> None:
    keys = torch.randint(-(2**62), 2**62, (3,))
    shape, size = (4, 8, 6), 2
    if not divides(split, shape, size):
        size = 1
    with Keyed(keys, 1) as draws:
        whole = draws.mask(shape, 0.7)
    assert torch.equal(torch.ops.piper.keyed_mask(torch.zeros(shape), keys, 1, 0.7), whole)
    dim, first = int(split.dim or 0), Split(0)
    sizes = dealt_blocks(split, shape[dim])
    for rank in range(size):
        mine = part(whole, split, size, rank)
        cuts: list[Any] = [[dim], [size], [len(sizes)], sizes, [torch.tensor([rank])]]
        drawn = torch.ops.piper.keyed_mask_part(mine, keys, 1, 0.7, shape, *cuts)
        assert torch.equal(drawn, mine)
        for second in range(2):  # and cut along another axis
            both = part(mine, first, 2, second)
            cuts = [
                [dim, 0], [size, 2], [len(sizes), 1], [*sizes, mine.shape[0]],
                [torch.tensor([rank]), torch.tensor([second])],
            ]  # fmt: skip
            drawn = torch.ops.piper.keyed_mask_part(both, keys, 1, 0.7, shape, *cuts)
            assert torch.equal(drawn, both)


def _checked(chunk: Any) -> Counter[str]:
    found = Counter[str]()
    inputs = random_inputs(chunk)
    module = forward_code(chunk.code)
    _check_module(module, [inputs[name] for name in chunk.inputs], found, 2)
    return found


def _check_module(
    module: fx.GraphModule, given: list[Tensor], found: Counter[str], size: int
) -> None:
    """All distinct calls of a graph, on the values that they have in a run."""
    run = fx.Interpreter(module, garbage_collect_values=False)
    with torch.no_grad():
        run.run(*given)
    for node, value in run.env.items():
        node.meta["val"] = value
    seen = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or not tensor_args(node):
            continue
        args = [(a.meta["val"].shape, a.meta["val"].dtype) for a in tensor_args(node)]
        key = repr((node.target, args, [a for a in node.args if not isinstance(a, fx.Node)]))
        if key not in seen and (rule := rule_of(node)) is not None:
            seen.add(key)
            for answer in _answers(node, rule, size):
                _check(node, answer, size)
                found[operator_name(node)] += 1


def _answers(node: fx.Node, rule: Callable[[Ask], Answer], size: int) -> Iterator[Answer]:
    """What a rule says of all layouts of the arguments, of which at most two are not replicated."""
    args = tensor_args(node)
    known = set()
    for layouts in product(*(list(_layouts(a.meta["val"], size)) for a in args)):
        if not 0 < sum(layout != REPLICATED for layout in layouts) < 3:
            continue
        answer = rule(Ask(node, args, layouts, size, weights=args[1:]))
        for layout, want in zip(layouts, answer.wants, strict=True):
            assert want != PARTIAL or layout == PARTIAL, "nothing becomes a partial sum"
        fits = all(
            divides(want, a.meta["val"].shape, size)
            for a, want in zip(args, answer.wants, strict=True)
            if isinstance(want, Split)
        )
        key = repr((answer.wants, answer.makes))
        if fits and key not in known and any(want != REPLICATED for want in answer.wants):
            known.add(key)
            yield answer


def _layouts(tensor: Tensor, size: int) -> Iterator[Layout]:
    yield REPLICATED
    for dim, blocks in product(range(tensor.dim()), (1, 2)):
        if tensor.shape[dim] > 1 and divides(Split(dim, blocks), tensor.shape, size):
            yield Split(dim, blocks)
            if blocks == 2:
                yield Split(dim, blocks, mirrored=True)
    if tensor.is_floating_point():
        yield PARTIAL


class _Writer:
    """The local code of one call."""

    def __init__(self, num_args: int) -> None:
        self.graph = fx.Graph()
        self.args = [self.graph.placeholder(f"x{index}") for index in range(num_args)]
        self.held = self.graph.placeholder("place")

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def place(self) -> fx.Node:
        return self.held


def _check(node: fx.Node, answer: Answer, size: int) -> None:
    args, expected = tensor_args(node), node.meta["val"]
    run = _local_code(node, answer, len(args))
    given = [_parts(a.meta["val"], want, size) for a, want in zip(args, answer.wants, strict=True)]
    leaves = [[_leaf(each) for each in parts] for parts in given]
    ranks = [
        _listed(run(*(parts[rank] for parts in leaves), torch.tensor([rank])))
        for rank in range(size)
    ]
    makes = answer.makes if isinstance(answer.makes, list) else [answer.makes]
    for index, (layout, value) in enumerate(zip(makes, _listed(expected), strict=True)):
        _compare(node, answer, [rank[index].detach() for rank in ranks], layout, value)
    whole = [_leaf(a.meta["val"]) for a in args]
    each = iter(whole)
    new, named = fx.map_arg((node.args, node.kwargs), lambda _: next(each))
    results = _listed(node.target(*new, **named))  # type: ignore[operator]
    if not any(result.requires_grad for result in results):
        return
    _backward(results, [REPLICATED] * len(results), 1, 0)
    for rank in range(size):
        _backward(ranks[rank], makes, size, rank)
    for parts, want, leaf in zip(leaves, answer.wants, whole, strict=True):
        if leaf.grad is not None:
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in parts]
            # As gradients lie: partial of what all ranks read whole, whole of a partial sum.
            dual = PARTIAL if want == REPLICATED else REPLICATED if want == PARTIAL else want
            _compare(node, answer, grads, dual, leaf.grad)


def _local_code(node: fx.Node, answer: Answer, num_args: int) -> fx.GraphModule:
    writer = _Writer(num_args)
    if answer.code is not None:
        made = answer.code(writer, writer.args)
    else:
        each = iter(writer.args)
        new, named = fx.map_arg((node.args, node.kwargs), lambda _: next(each))
        made = writer.graph.call_function(node.target, new, named)  # type: ignore[arg-type]
    writer.graph.output(made)
    return fx.GraphModule(nn.Module(), writer.graph)


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _backward(results: list[Tensor], layouts: list[Layout], size: int, rank: int) -> None:
    """From the same gradients of whole results; a term of a sum has that of the sum."""
    pairs = []
    for result, layout in zip(results, layouts, strict=True):
        if result.requires_grad:
            shape = list(result.shape)
            if isinstance(layout, Split):
                shape[int(layout.dim or 0)] *= size
            generator = torch.Generator().manual_seed(2)
            tangent = torch.randn(shape, dtype=result.dtype, generator=generator)
            own = tangent if layout == PARTIAL else part(tangent, layout, size, rank)
            pairs.append((result, own))
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]


def _parts(whole: Tensor, layout: Layout, size: int) -> list[Tensor]:
    if layout != PARTIAL:
        return [part(whole, layout, size, rank) for rank in range(size)]
    generator = torch.Generator().manual_seed(1)
    rest = [
        torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(size - 1)
    ]
    return [*rest, whole - sum(rest)]


def _compare(
    node: fx.Node, answer: Answer, mine: list[Tensor], layout: Layout, expected: Tensor
) -> None:
    if operator_name(node) in ("new_empty", "empty_like"):  # whatever was there
        return
    whole = whole_of(mine, layout)
    told = f"{node.format_node()} as {answer.wants} -> {layout}"
    assert whole.shape == expected.shape and whole.dtype == expected.dtype, told
    bound = TOLERANCE.get(expected.dtype, 0.0)
    error = (whole.double() - expected.double()).norm() / expected.double().norm().clamp(min=1.0)
    assert error <= bound, f"{told}: {error}"
    if layout == REPLICATED:
        assert all(torch.equal(mine[0], other) for other in mine), told
