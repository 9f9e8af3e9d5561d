"""From model code to chunks: tags, untagged code, shared bodies, initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.program import Program
from piper.bodies.files.codec import content_hash, decode, encode
from piper.errors import PlanError, TraceError
from piper.runtime.worker.weights import initial_value


def _trace(make_model: Any, batch: torch.Tensor | None = None, **options: Any) -> Program:
    batch = torch.ones(8, 6) if batch is None else batch
    return piper.trace(make_model, batch, lambda model, batch: model(batch).mean(), **options)


class Net(nn.Module):
    """An untagged embedding-like layer, three equal stages, an untagged head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("table", torch.arange(6.0).cumsum(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6).tril() * self.table
        x = self.enter(x)
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.relu(layer(x) @ mask)
        return self.leave(x)


def test_untagged_code_joins_its_neighbours() -> None:
    chunks = _trace(Net).source.at(8)[1].chunks
    assert [chunk.tags for chunk in chunks] == [(("PP", 0),), (("PP", 1),), (("PP", 2),)]
    assert "enter.weight" in chunks[0].inputs  # before the first region
    assert "leave.weight" in chunks[2].inputs  # after the last one
    # The mask depends on a buffer only: every stage makes its own.
    assert all("table" in chunk.inputs for chunk in chunks)
    assert all(len(chunk.outputs) == 1 for chunk in chunks)


def test_tags_from_outside_equal_annotations() -> None:
    class Bare(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(6, 6).tril() * self.table
            x = self.enter(x)
            for layer in self.layers:
                x = torch.relu(layer(x) @ mask)
            return self.leave(x)

    def make() -> nn.Module:
        return piper.tag(Bare(), PP=[["enter", "layers.0"], "layers.1", ["layers.2", "leave"]])

    inside, outside = (_trace(m).source.at(8)[1].chunks for m in (Net, make))
    assert [chunk.tags for chunk in inside] == [chunk.tags for chunk in outside]
    assert [set(chunk.inputs) for chunk in inside][1:] == [set(c.inputs) for c in outside][1:]
    patterns = piper.tag(Bare(), EP="layers.*")
    assert patterns._piper_tags == {"EP": {"layers.0": 0, "layers.1": 1, "layers.2": 2}}
    with pytest.raises(TraceError, match=r"no module is called 'layer\.0' \(did you mean"):
        piper.tag(Bare(), PP=[["layer.0"]])


def test_regions_nest_and_a_region_may_have_several_chunks() -> None:
    class Nested(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                x = self.enter(x)
                with piper.annotate("EP"):
                    x = self.layers[0](x)
                with piper.annotate("EP", 7):
                    x = self.layers[1](x)
                return self.leave(x)

    names = list(_trace(Nested).graph.nodes)
    forward = ["F[PP=0.0]", "F[PP=0,EP=0]", "F[PP=0,EP=7]", "F[PP=0.1]"]
    assert names == [*forward, *(name.replace("F", "B") for name in reversed(forward))]


def test_another_tag_may_hold_the_stages() -> None:
    class Staged(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with piper.annotate("STAGE"):
                    x = layer(x)
            return self.leave(x)

    assert list(_trace(Staged).graph.tag_values) == ["STAGE"]
    assert len(_trace(Staged).graph.nodes) == 8  # the head stays outside
    assert len(_trace(Staged, stages="STAGE").graph.nodes) == 6


def test_equal_layers_share_their_bodies() -> None:
    job = _trace(Net).lower()
    bodies = {node.name: node.body for node in job.graph.chunks}
    assert bodies["F[PP=0]"] != bodies["F[PP=1]"] != bodies["F[PP=2]"]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with piper.annotate("PP"):
                    x = torch.relu(layer(x))
            return x

    job = _trace(Deep).lower()
    inner = {node.body for node in job.graph.chunks if node.tag("PP") in (1, 2, 3, 4)}
    assert len(inner) == 2  # one forward, one backward


def test_code_without_gradient_stays_without() -> None:
    class Partly(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                with torch.no_grad():
                    scale = self.layers[0](x)
                x = self.enter(x)
            with piper.annotate("PP"):
                return self.leave(x) * scale

    job = _trace(lambda: Partly().double(), torch.ones(8, 6, dtype=torch.float64)).lower()
    trained = {"enter.weight", "enter.bias", "leave.weight", "leave.bias"}
    assert {name for bucket in job.plan.buckets for name in bucket.params} == trained
    assert {name for name, tensor in job.plan.tensors.items() if tensor.trainable} == trained
    updates = {
        task.bucket for part in job.plan.classes for task in part.tasks if task.kind == "update"
    }
    assert updates == set(range(len(job.plan.buckets)))


def test_bodies_travel_as_text() -> None:
    job = _trace(Net).lower()
    for name, text in job.bodies.items():
        assert content_hash(text) == name
        module = decode(text)
        constants = dict(module.named_buffers())
        assert encode(module.graph, constants) == text


def test_weights_come_from_seed_and_name() -> None:
    job = _trace(lambda: Net().double(), torch.ones(8, 6).double()).lower()
    first = {
        name: initial_value(spec, job.bodies, seed=0) for name, spec in job.plan.tensors.items()
    }
    again = initial_value(job.plan.tensors["enter.weight"], job.bodies, seed=0)
    other = initial_value(job.plan.tensors["enter.weight"], job.bodies, seed=1)
    assert torch.equal(first["enter.weight"], again) and not torch.equal(again, other)
    assert not torch.equal(first["layers.0.weight"], first["layers.1.weight"])
    assert torch.equal(first["table"], torch.arange(6.0).cumsum(0).double())
    # What `make_model` does to a fresh tensor happens here too: nn.Linear's bound, then float64.
    assert again.dtype == torch.float64 and again.abs().max() <= 6**-0.5
    assert 0.1 < again.std() < 0.35


def test_tied_weights_stay_tied_through_a_conversion() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    values = _trace(lambda: Tied().double(), torch.ones(8, 6).double()).graph.values
    assert sorted(n for n, v in values.items() if v.role == "param") == [
        "one.bias",
        "one.weight",
        "two.bias",
    ]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda model, batch: model(batch), "step returns a tensor of shape"),
        (lambda model, batch: (model(batch).mean(), 1, 2), "legal: a mean loss, or a pair"),
        (
            lambda model, batch: {"loss": model(batch).mean()},
            "step must return a mean loss, or a pair",
        ),
        (lambda model, batch: batch.mean(), "does not depend on any parameter"),
    ],
)
def test_what_step_may_return(step: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        piper.trace(Net, torch.ones(8, 6), step)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(TraceError, match="differ in their number of samples"):
        piper.trace(
            Net, [torch.ones(8, 6), torch.ones(4)], lambda model, batch: model(batch[0]).mean()
        )
    with pytest.raises(TraceError, match="has no batch dimension"):
        piper.trace(
            Net, [torch.ones(8, 6), torch.ones(())], lambda model, batch: model(batch[0]).mean()
        )


def test_a_tensor_from_outside_the_model_is_refused() -> None:
    outside = torch.ones(6)
    with pytest.raises(TraceError, match="neither a parameter, a buffer nor part of the batch"):
        piper.trace(Net, torch.ones(8, 6), lambda model, batch: (model(batch) * outside).mean())


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="no kind of device is called 'tpu'"):
        _trace(Net).lower(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="there is no CUDA device here"):
            _trace(Net).lower(device="cuda")
