"""Machines: figures that cannot be are refused, and what is said of their source is true."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from piper.cli.main import main
from piper.cost.machine import Curve, Linear, Link, Machine
from piper.cost.machine_file import load_machine, save_machine
from piper.cost.presets import MACHINES, machine
from piper.errors import FileError
from tests.plans import plan_of

H100 = MACHINES["h100"]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("has no flops", {"flops": {}}),
    ("flops of float32 is 0.0", {"flops": {"float32": 0.0}}),
    ("flops of bfloat16 is -5.0", {"flops": {"float32": 1.0, "bfloat16": -5.0}}),
    ("flops of float32 is inf", {"flops": {"float32": math.inf}}),
    ("bandwidth is nan", {"bandwidth": math.nan}),
    ("ranks_per_node is 0", {"ranks_per_node": 0}),
    ("launch is -1.0", {"launch": -1.0}),
    ("dispatch is -1.0", {"dispatch": -1.0}),
    ("exchange is inf", {"exchange": math.inf}),
    ("between is nan", {"between": math.nan}),
    ("sms is -1", {"sms": -1}),
    ("latency of node is nan", {"node": Link(math.nan, 1.0)}),
    ("bandwidth of network is inf", {"network": Link(0.0, math.inf)}),
    ("share of network is 1.0", {"network": Link(0.0, 1.0, share=1.0)}),
    ("body b is -1.0", {"bodies": {"b": -1.0}}),
    ("fixed of add is -1.0", {"kinds": {"add": Linear(-1.0)}}),
    ("per_byte of add is nan", {"kinds": {"add": Linear(0.0, math.nan)}}),
    ("share of send/2 is 2.0", {"exchanges": {"send/2": Curve([(1.0, 1.0)], 2.0)}}),
]


@pytest.mark.parametrize(("told", "changes"), BAD, ids=[told for told, _ in BAD])
def test_figures_that_cannot_be_are_refused(told: str, changes: dict[str, Any]) -> None:
    with pytest.raises(FileError, match=told):
        Machine(**{**msgspec.structs.asdict(H100), **changes})


def test_a_file_with_such_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_machine(H100, path)
    assert load_machine(path) == H100
    document = json.loads(path.read_bytes())
    document["machine"]["flops"] = {"float32": 0}
    path.write_text(json.dumps(document))
    with pytest.raises(FileError, match=r"mine.json is no machine: .*flops of float32 is 0"):
        load_machine(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_machine(H100, path)
    document = json.loads(path.read_bytes()) | {"version": 1}
    path.write_text(json.dumps(document))
    with pytest.raises(
        FileError, match=r"mine.json has version 1\n  legal: version 2: measure again"
    ):
        load_machine(path)


def test_the_source_names_the_network_that_is_there() -> None:
    assert "Quantum-2" in H100.source
    other = machine("h100", network="roce-100g")
    assert other.source.startswith("NVIDIA H100") and other.source.endswith("100 Gb/s a GPU")
    assert "Quantum-2" not in other.source


def test_simulate_says_where_its_figures_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan_of("dp").to_json())
    options = ["--machine", "h200", "--network", "roce-100g", "--ranks-per-node", "4"]
    assert main(["simulate", str(path), *options]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    source = machine("h200", network="roce-100g").source
    assert first == f"machine H200, 4 ranks a node: {source}"
    assert main(["simulate", str(path), *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"] == {"name": "H200", "ranks_per_node": 4, "source": source}
