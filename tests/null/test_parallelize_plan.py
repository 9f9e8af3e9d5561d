"""Plans for torch's parallelize_module, brought to shard_tensor."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import piper
from piper import where
from piper.errors import TensorError
from piper.strategies import parallel, tensor_params
from tests.tensor_zoo import CASES, program_of
from tests.zoo import ADAMW

PLAN = {
    "embed": RowwiseParallel(),
    "blocks.*.norm1": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(input_layouts=(None,), desired_input_layouts=(None,)),
    "blocks.*.attention.q": ColwiseParallel(),
    "blocks.*.attention.k": ColwiseParallel(),
    "blocks.*.attention.v": ColwiseParallel(),
    "blocks.*.attention.o": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.gate": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(),
}


def test_styles_become_the_splits_that_are_found() -> None:
    params = tensor_params(CASES["dense"].make_model(), PLAN)
    assert params["embed.weight"] == 0 and params["blocks.1.attention.o.weight"] == 1
    assert params["blocks.0.attention.q.bias"] == 0 and "blocks.0.attention.o.bias" not in params

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=1, dp=1, ep=1, tp=2)
        s.place(where(), mesh.at(pp=0))
        s.replicate(where(), over=("dp", "ep"))
        s.shard_tensor(where(), over="tp", params=params)
        s.split(where(), "MB", 1)

    found = program_of("dense").apply(parallel(tp=2)).lower(optimizer=ADAMW).plan
    mine = program_of("dense").apply(strategy).lower(optimizer=ADAMW).plan
    assert mine.classes == found.classes and mine.tensors == found.tensors


def test_tables_by_column() -> None:
    assert tensor_params(nn.Sequential(nn.Embedding(8, 4)), {"0": ColwiseParallel()}) == {
        "0.weight": 1
    }


def test_what_is_not_known_is_refused() -> None:
    model = CASES["dense"].make_model()
    with pytest.raises(TensorError, match=r"no module is called 'blocks\.\*\.attention\.wq'"):
        tensor_params(model, {"blocks.*.attention.wq": ColwiseParallel()})
    with pytest.raises(TensorError, match="embed: the style int is not known"):
        tensor_params(model, {"embed": 3})
