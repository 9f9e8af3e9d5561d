"""Which operators compute in float32 where a model computes in bfloat16: dtypes in captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import transformer
from examples import dense, moe_lm
from torch import Tensor, fx, nn

import piper
from piper.bodies.captured_nodes import OF_DTYPE, callee, value_of
from piper.bodies.expert_ops import grouped_mm
from piper.bodies.row_ops import put_rows, take_rows
from piper.frontend.capture.capture import Capture, Recording, finish, record
from piper.ir.nodes import Chunk
from piper.strategies import parallel

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
Operator = Callable[[Tensor], Any]


class Applied(nn.Module):
    """What each function makes of a linear layer's result, marked by a cast to float64."""

    def __init__(self, *operators: Operator) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for operator in self.operators:
            total = total + operator(self.linear(x)).double().mean()
        return total


def _recording(model: Callable[[], nn.Module], **options: Any) -> Recording:
    options = {"any_rows": True, "float32_operators": True} | options
    batch = torch.ones(8, 8)
    return record(model, batch, lambda m, b: m(b), rows=8, dtype="bfloat16", **options)


def _capture(model: Callable[[], nn.Module], **options: Any) -> Capture:
    return finish(_recording(model, **options), 8)


def _nodes(capture: Capture, name: str) -> list[fx.Node]:
    return [node for node in capture.graph.nodes if callee(node) == name]


def _casts(capture: Capture) -> list[fx.Node]:
    return [node for node in capture.graph.nodes if node.meta.get(OF_DTYPE)]


def _dtypes(*operators: Operator, **options: Any) -> list[torch.dtype]:
    """Of what each operator makes."""
    capture = _capture(lambda: Applied(*operators), **options)
    return [value_of(node.all_input_nodes[0]).dtype for node in _nodes(capture, "double")]


def _targets(x: Tensor) -> Tensor:
    return x.detach().argmax(-1)


WIDE: dict[str, Operator] = {
    "F.softmax": lambda x: F.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "special.softmax": lambda x: torch.special.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "**": lambda x: x**2,
    "2 **": lambda x: 2**x,
    "pow": lambda x: x.pow(3),
    "1 /": lambda x: 1 / x,
    "exp": lambda x: torch.exp(x),
    "aten.exp": lambda x: torch.ops.aten.exp.default(x),
    "log": lambda x: x.log(),
    "rsqrt": lambda x: x.rsqrt(),
    "reciprocal": lambda x: x.reciprocal(),
    "sum": lambda x: x.sum(-1),
    "torch.sum": lambda x: torch.sum(x),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "normalize": lambda x: F.normalize(x),
    "softplus": lambda x: F.softplus(x),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "cross_entropy": lambda x: F.cross_entropy(x, _targets(x)),
    "nll_loss": lambda x: F.nll_loss(x, _targets(x)),
    "mse_loss": lambda x: F.mse_loss(x, x.detach()),
    "l1_loss": lambda x: F.l1_loss(x, x.detach()),
    "kl_div": lambda x: F.kl_div(x, x.detach(), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.detach()),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "a norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "behind one": lambda x: x + x.softmax(-1),
    "stacked with one": lambda x: torch.stack([x, x.exp()]),
}
NARROW: dict[str, Operator] = {
    "linear": lambda x: F.linear(x.exp(), x),
    "@": lambda x: x.exp() @ x,
    "matmul": lambda x: torch.matmul(x, x.exp()),
    "mm": lambda x: x.exp().mm(x.exp()),
    "addmm": lambda x: torch.addmm(x, x.exp(), x),
    "bmm": lambda x: torch.bmm(x.exp()[None], x[None]),
    "baddbmm": lambda x: torch.baddbmm(x.exp()[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.exp(), x),
    "conv1d": lambda x: F.conv1d(x.exp()[None], x[:, :, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x.exp(), x, x),
    "grouped_mm": lambda x: grouped_mm(x.exp(), x[None], torch.full((1,), 8)),
    "put_rows": lambda x: put_rows(x.exp(), torch.arange(8)),
    "relu": lambda x: x.relu(),
    "mean": lambda x: x.mean(),
    "a float32 scalar": lambda x: x * x.sum(),
    "batch_norm": lambda x: F.batch_norm(x.exp(), None, None, x[0], x[0], training=True),
}
EQUAL: dict[str, Operator] = {
    "index_add": lambda x: x.index_add(0, torch.arange(8), x.exp()),
    "scatter_add": lambda x: x.exp().scatter_add(0, torch.arange(8).expand(8, 8), x),
    "lerp": lambda x: x.lerp(x.exp(), 0.5),
    "dot": lambda x: x[0].dot(x[0].exp()),
}


def test_sensitive_operators_compute_in_float32() -> None:
    assert dict(zip(WIDE, _dtypes(*WIDE.values()), strict=True)) == dict.fromkeys(WIDE, FLOAT32)


def test_products_compute_in_the_narrow_dtype() -> None:
    found = dict(zip(NARROW, _dtypes(*NARROW.values()), strict=True))
    assert found == dict.fromkeys(NARROW, BFLOAT16)


def test_operators_that_do_not_promote_take_the_widest() -> None:
    assert dict(zip(EQUAL, _dtypes(*EQUAL.values()), strict=True)) == dict.fromkeys(EQUAL, FLOAT32)


def test_it_is_a_choice() -> None:
    assert set(_dtypes(*WIDE.values(), float32_operators=False)) == {BFLOAT16}


def test_inputs_are_in_the_dtype_too() -> None:
    capture = _capture(lambda: Applied(WIDE["cross_entropy"], WIDE["layer_norm"], NARROW["@"]))
    for name, dtype in (("cross_entropy", FLOAT32), ("layer_norm", FLOAT32), ("matmul", BFLOAT16)):
        [node] = _nodes(capture, name)
        values = [value_of(arg) for arg in node.all_input_nodes]
        assert {value.dtype for value in values if value.is_floating_point()} == {dtype}
    for cast in _casts(capture):
        [reader] = cast.users
        assert cast.meta["nn_module_stack"] == reader.meta["nn_module_stack"]
        assert cast.meta["stack_trace"] == reader.meta["stack_trace"]


def test_a_dtype_of_the_users_own_counts() -> None:
    found = _dtypes(
        lambda x: F.softmax(x, -1, dtype=BFLOAT16),
        lambda x: x.sum(-1, dtype=BFLOAT16),
        lambda x: x.log_softmax(-1, BFLOAT16),
        lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
        lambda x: x.float().bfloat16(),
    )
    assert found == [BFLOAT16, BFLOAT16, BFLOAT16, torch.float64, BFLOAT16]


def test_code_under_its_own_autocast_is_left_to_it() -> None:
    def without(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.softmax(x, -1) + x.exp()

    def half(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return x @ x

    capture = _capture(lambda: Applied(without, half))
    assert not _casts(capture)
    nodes = _nodes(capture, "double")
    assert [value_of(n.all_input_nodes[0]).dtype for n in nodes] == [BFLOAT16, torch.float16]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_gets_what_it_was_traced_with() -> None:
    assert _dtypes(lambda x: Twice.apply(x.softmax(-1))) == [BFLOAT16]


def _added(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total.index_add_(0, torch.arange(8), x.softmax(-1))
    total[torch.arange(4)] = x[:4].exp()
    total += x.log()
    total.exp_()
    total.addmm_(x, x.exp())
    return total


def test_changes_in_place_stay_in_place() -> None:
    capture = _capture(lambda: Applied(_added))
    changers = ("index_add_", "setitem", "iadd", "exp_", "addmm_")
    for name in changers:
        [node] = _nodes(capture, name)
        target = node.args[0]
        assert isinstance(target, fx.Node) and callee(target) != "to"
        assert value_of(target).dtype == BFLOAT16
    [mean] = _nodes(capture, "double")
    assert value_of(mean.all_input_nodes[0]).dtype == BFLOAT16


def test_a_change_in_place_of_a_float32_tensor_takes_float32() -> None:
    def changed(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        return y.index_add_(0, torch.arange(8), x)

    assert _dtypes(changed) == [FLOAT32]


class Attention(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k = self.q(x), self.k(x)
        if self.way == "changed":
            x.mul_(2)
        if self.way == "regions":
            with piper.annotate("PP"):
                v = self.v(x)
        else:
            v = self.v(x)
        return F.scaled_dot_product_attention(q, k, v).sum()


@pytest.mark.parametrize(("way", "number"), [("", 1), ("changed", 2), ("regions", 2)])
def test_one_cast_serves_a_module_in_a_region(way: str, number: int) -> None:
    capture = _capture(lambda: Attention(way))
    [norm] = _nodes(capture, "layer_norm")
    narrowed = [n for n in _casts(capture) if value_of(n).dtype == BFLOAT16]
    assert len(narrowed) == number
    assert all(node.args[0] is norm for node in narrowed)


def test_a_recording_knows_the_types_at_other_numbers_of_rows() -> None:
    recording = _recording(lambda: Applied(WIDE["layer_norm"], NARROW["linear"], EQUAL["lerp"]))
    types = recording.types_at(16)
    for node in finish(recording, 16).graph.nodes:
        value = value_of(node)
        if isinstance(value, Tensor) and node.op.startswith("call"):
            said = types[f"%{node.name}"]
            assert (said.shape, said.dtype) == (tuple(value.shape), str(value.dtype)[6:])


def _dense(**options: Any) -> Any:
    program = piper.trace(dense.model, dense.batch(), dense.step)
    return program.apply(parallel(pp=2, microbatches=2)).lower(**options)


def test_a_transformers_residual_stream_stays_narrow() -> None:
    values = _dense(precision="bf16").graph.values.values()
    assert {v.dtype for v in values if v.role == "activation"} == {"bfloat16"}
    assert {v.dtype for v in values if v.role == "loss"} == {"float32"}


def test_equal_layers_share_bodies() -> None:
    wide, narrow = (_dense(precision=precision).plan for precision in (None, "bf16"))
    assert len(narrow.bodies) == len(wide.bodies)


class NormsBehind(nn.Module):
    """The first layer takes bfloat16, and the others what it made: float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            with piper.annotate("PP"):
                x = norm(x + layer(x))
        return x.mean()


def test_equal_code_on_other_dtypes_is_another_body() -> None:
    program = piper.trace(NormsBehind, torch.ones(8, 8), lambda m, b: m(b))
    program = program.apply(parallel(pp=1, microbatches=2))
    wide, narrow = (program.lower(precision=precision).plan for precision in (None, "bf16"))
    assert len(narrow.bodies) > len(wide.bodies)


MOVES: dict[str, Operator] = {
    "view": lambda x: x.view(4, 2, 8),
    "reshape": lambda x: x.reshape(-1, 8),
    "flatten": lambda x: x.unsqueeze(0).flatten(0, 1),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0).contiguous(),
    "index_select": lambda x: x.index_select(0, torch.arange(8)),
    "take_rows": lambda x: take_rows(x, torch.arange(16), 2),
    "rows that a tensor names": lambda x: x[torch.arange(8)],
    "cat": lambda x: torch.cat([x, x]),
    "torch.stack": lambda x: torch.stack([x, x.view(8, 8)]),
}


@pytest.mark.parametrize("name", MOVES)
def test_values_are_cast_before_they_move(name: str) -> None:
    capture = _capture(lambda: Applied(lambda x: MOVES[name](x.exp()) @ torch.ones_like(x)))
    [exp] = _nodes(capture, "exp")
    [cast] = [node for node in _casts(capture) if value_of(node).dtype == BFLOAT16]
    assert cast.args[0] is exp and list(exp.users) == [cast]


def _changed(x: Tensor) -> Tensor:
    y = x.exp()
    moved = y.view(8, 8)
    y.mul_(2)
    return moved @ x


STAY: dict[str, Operator] = {
    "another reads float32": lambda x: (y := x.exp().t()) @ x + y.cumsum(-1).bfloat16(),
    "changed since": _changed,
    "a slice has fewer elements": lambda x: x.exp()[:4] @ x,
    "rows are added up": lambda x: x.exp()[:1].expand(8, 8) @ x,
    "not moved": lambda x: x.exp().relu() @ x,
    "bits": lambda x: x.exp().view(torch.int16).bfloat16() @ x,
}


@pytest.mark.parametrize("name", STAY)
def test_values_are_cast_where_they_are_read(name: str) -> None:
    capture = _capture(lambda: Applied(STAY[name]))
    [product] = _nodes(capture, "matmul")
    [exp] = _nodes(capture, "exp")
    narrowed = [node for node in _casts(capture) if value_of(node).dtype == BFLOAT16]
    if name == "bits":
        assert [node.args[0] for node in narrowed] == [exp]
    else:
        assert narrowed == [product.args[0]] and narrowed[0].args[0] is not exp


def test_one_cast_serves_moves_and_products() -> None:
    """It is moved in front of the first of them."""

    def both(x: Tensor) -> Tensor:
        y = x.exp()
        first, second = y.index_select(0, torch.arange(8)), F.linear(y, x)
        return F.linear(first, x) + second + y.cumsum(-1).bfloat16()

    capture = _capture(lambda: Applied(both))
    [cast] = [node for node in _casts(capture) if value_of(node).dtype == BFLOAT16]
    assert {callee(user) for user in cast.users} == {"index_select", "linear"}


RESIDUAL: dict[str, Operator] = {
    "a norm behind layers": lambda x: x + F.layer_norm(F.linear(x, x), (8,)),
    "weights of experts": lambda x: F.linear(x, x) * x.softmax(-1) + x,
    "torch.add": lambda x: torch.add(x, F.linear(x, x).softmax(-1)),
}
PROMOTED: dict[str, Operator] = {
    "of float32": lambda x: x.exp() + F.linear(x.exp(), x).exp(),
    "traced in float32": lambda x: x + F.linear(x, x).float().exp(),
    "without products": lambda x: x + torch.log1p(torch.exp(-x)),
    "multiplied": lambda x: x * F.linear(x, x).softmax(-1),
    "subtracted": lambda x: x - F.linear(x, x).logsumexp(-1, keepdim=True),
    "another value's": lambda x: F.linear(x, x) + F.linear(x, x).exp(),
    "cross entropy by hand": lambda x: (
        (y := F.linear(x, x)).logsumexp(-1) + -y.gather(-1, _targets(x)[:, None])[:, 0]
    ),
    "losses": lambda x: (y := x.mean()) + F.linear(x, x * y).sum(),
}


def test_a_branch_is_added_in_the_dtype_of_its_stream() -> None:
    found = dict(zip(RESIDUAL, _dtypes(*RESIDUAL.values()), strict=True))
    assert found == dict.fromkeys(RESIDUAL, BFLOAT16)


def test_other_sums_are_promoted() -> None:
    found = dict(zip(PROMOTED, _dtypes(*PROMOTED.values()), strict=True))
    assert found == dict.fromkeys(PROMOTED, FLOAT32)


def _benchmark() -> piper.Program:
    sizes = transformer.Sizes(16, 4, 2, 32, 32, 8, 4, 2, experts=True)
    model = partial(transformer.Transformer, sizes, 2)
    return piper.trace(model, transformer.make_batch(sizes), transformer.step)


def _example() -> piper.Program:
    return piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)


@pytest.mark.parametrize("program", [_benchmark, _example])
def test_rows_go_to_experts_and_stages_in_bfloat16(program: Callable[[], piper.Program]) -> None:
    strategy = parallel(pp=2, dp=2, ep=2, microbatches=2)
    graph = program().apply(strategy).lower(precision="bf16").graph
    chunks = [node for node in graph.nodes.values() if isinstance(node, Chunk)]
    experts = [chunk for chunk in chunks if chunk.tag("EP") is not None]
    assert experts
    read = [graph.values[name] for chunk in experts for name in chunk.inputs]
    found = {v.dtype for v in read if v.role in ("activation", "grad", "wire")}
    assert found == {"bfloat16", "int64"}
    sent = [v for v in graph.values.values() if v.role == "wire"]
    assert sent and {v.dtype for v in sent} <= {"bfloat16", "int64"}
    losses = [v for v in graph.values.values() if v.role == "loss"]
    assert losses and {v.dtype for v in losses} == {"float32"}
