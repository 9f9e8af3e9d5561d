"""What people see of a training run: lines of text, JSON lines, records."""

import io
import json
import math
import re

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper.cost.hardware import peak_flops
from piper.errors import RunError
from piper.training.line import Log, step_text
from piper.training.meter import unit_of
from piper.training.records import Record, Training
from tests.heard import Heard
from tests.strategies import strategy_of
from tests.zoo import CASES, program_of

RECORD = Record(
    step=7, loss=3.14159, norm=0.921, lr=3e-3, ms=41.2, per_second=12_480, mfu=0.412,
    memory=327_155_712,
)  # fmt: skip
NAME = "moe"


def _job() -> piper.Job:
    strategy = strategy_of("ep2", "none")
    return program_of(NAME).apply(strategy).lower(clip=1.0)


def test_a_step_is_one_line_of_plain_text() -> None:
    text = step_text(RECORD, 60, 132.4, unit="tokens")
    assert text == (
        "step  7/60  loss 3.1416  norm 0.921  lr 3.00e-03  41 ms  12.5k tokens/s  MFU 41.2%  "
        "memory 312 MiB  ETA 2:12"
    )
    less = msgspec.structs.replace(RECORD, norm=None, mfu=None, ms=4.5, memory=3 * 2**30)
    assert step_text(less, None, None, unit="samples") == (
        "step 7  loss 3.1416  lr 3.00e-03  4.50 ms  12.5k samples/s  memory 3.0 GiB"
    )
    coloured = step_text(RECORD, 60, 132.4, unit="tokens", colour=True)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == text != coloured


def test_json_lines_have_an_event_each(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [CASES[NAME].batch(seed) for seed in range(3)]
    training = piper.train(
        _job(), batches, steps=3, launch="loopback", evaluate=batches[:1], evaluate_every=2,
        log="json",
    )  # fmt: skip
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["note", "step", "step", "evaluation", "step", "evaluation", "end"]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["loss"] for event in steps] == training.losses
    for number, event in enumerate(steps, 1):
        assert (event["step"], event["steps"], event["unit"]) == (number, 3, "tokens")
        assert event["norm"] > 0 and event["ms"] > 0 and event["lr"] == 0.1
        assert event["memory"] > 2**20 and event["mfu"] is None and event["eta"] >= 0
        assert event["per_second"] == pytest.approx(64 / event["ms"] * 1e3)
    assert events[3]["step"] == 2 and events[-1]["evaluation"] == training.evaluation
    saved = json.loads(training.to_json())
    assert [record["loss"] for record in saved["records"]] == training.losses
    assert str(training).startswith("3 steps in ") and "evaluation" in str(training)


def test_text_has_a_line_for_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [CASES[NAME].batch(seed) for seed in range(2)]
    heard = Heard()
    piper.train(_job(), batches, steps=2, launch="loopback", callbacks=[heard])
    lines = capsys.readouterr().out.splitlines()
    assert [record.step for record in heard.of("step")] == [1, 2]
    pattern = (
        r"step \d/2  loss \d\.\d{4}  norm [\d.]+  lr 1\.00e-01  [\d.]+ ms  [\d.]+k? tokens/s  "
    )
    assert all(re.match(pattern + r"memory [\d.]+ [MG]iB  ETA 0:0\d$", line) for line in lines[1:3])
    assert re.match(r"2 steps in [\d.]+ s: loss [\d.]+ -> [\d.]+$", lines[-1]) and len(lines) == 4


def test_what_is_not_finite_is_text_in_json() -> None:
    out = io.StringIO()
    bad = msgspec.structs.replace(RECORD, loss=math.nan, norm=math.inf)
    Log("json", out=out).step(bad, 60, None)
    found = json.loads(out.getvalue(), parse_constant=lambda text: pytest.fail(text))
    assert found["loss"] == "nan" and found["norm"] == "inf"
    text = step_text(bad, 60, None, unit="tokens")
    assert "loss nan" in text and text.endswith("  NOT FINITE")
    assert "NOT FINITE" not in step_text(RECORD, 60, None, unit="tokens")
    training = Training("tokens", [bad, msgspec.structs.replace(RECORD, loss=-math.inf)])
    losses = [record["loss"] for record in json.loads(training.to_json())["records"]]
    assert losses == ["nan", "-inf"] and math.isnan(training.losses[0])


def _diverging(factor: float) -> piper.Program:
    """The loss of a batch of ones is finite, that of larger ones is not."""
    batch = torch.ones(4, 4)
    return piper.trace(
        lambda: nn.Linear(4, 4), batch, lambda m, x: (m(x) * (x * factor)).square().mean()
    )


def test_a_loss_that_is_not_finite_is_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [torch.ones(4, 4), *[torch.full((4, 4), 1e30) for _ in range(2)]]
    job = _diverging(1e6).lower(optimizer=piper.sgd(lr=0.0), clip=1.0)
    training = piper.train(job, batches, steps=3, launch="single")
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 1
    assert "warning: step 2: loss inf: not finite; training goes on" in printed
    assert printed.count("  NOT FINITE") == 2
    assert math.isfinite(training.losses[0]) and not math.isfinite(training.losses[1])
    piper.train(job, batches, steps=3, launch="single", log="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (warning,) = [line for line in lines if line["event"] == "warning"]
    assert warning["step"] == 2 and warning["text"].startswith("loss inf")
    assert [line["loss"] for line in lines if line["event"] == "step"][1] == "inf"


def test_training_may_end_at_a_loss_that_is_not_finite() -> None:
    batches, heard = [torch.ones(4, 4), torch.full((4, 4), 1e30)], Heard()
    job = _diverging(1e6).lower(optimizer=piper.sgd(lr=0.0))
    with pytest.raises(RunError, match="step 2: loss inf"):
        piper.train(job, batches, steps=2, launch="single", on_nan="stop", callbacks=[heard])
    assert len(heard.of("step")) == len(heard.of("failure")) == 1


def test_flops_of_a_step_do_not_depend_on_the_strategy() -> None:
    def flops(degrees: str, schedule: str, **options: object) -> float:
        strategy = strategy_of(degrees, schedule, **options)
        return program_of("deep_dense").apply(strategy).lower().plan.flops

    one = flops("one", "none")
    # Per token 2 x (3 + 1 + 1 + attention) x 8 x 8 in each of 4 stages, and the head; three times.
    assert one > 3 * 64 * 2 * (4 * 4 * 64 + 8 * 11)
    assert flops("pp2", "zbv") == flops("pp2_dp2", "dualpipev", zero=3) == one
    assert flops("pp2_dp2", "1f1b", recompute="nothing") == one


def test_what_is_counted_and_known_hardware() -> None:
    assert unit_of(_job().plan) == ("tokens", 64)
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA GH200 480GB", "float16") == 989e12
    assert peak_flops("cpu", "float32") is None
