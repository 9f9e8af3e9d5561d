"""Numbers that no plan or program can have are refused before anything counts on them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from piper.api.program_file import program_from_json
from piper.check import check_plan
from piper.cli.main import main
from piper.errors import CheckError, PlanError
from piper.plan.types import plan_from_json
from piper.strategies import parallel
from tests.plans import plan_of
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("mutants")
Change = Callable[[Any], Any]


def _set(*path: Any) -> Change:
    """Put the last of the path where the others lead."""
    *keys, last, value = path

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return change


PLANS: dict[str, Change] = {
    "there can be 1 to 1048576 ranks": _set("mesh", "axes", 1, 1, 10**12),
    "1 to 1048576 ranks": _set("mesh", "axes", 0, 1, 0),
    "two axes of the mesh have one name": _set("mesh", "axes", 1, 0, "pp"),
    "the data axes are dp, dp": _set("data_axes", ["dp", "dp"]),
    "1000000000 microbatches": _set("num_microbatches", 10**9),
    "no device is called 'tpu'": _set("device", "tpu"),
    "no optimizer is called 'os'": _set("param_groups", 0, "optimizer", "os"),
    "the optimizer's lr is no number": _set("param_groups", 0, "options", "lr", [{}]),
    "in a parameter group that does not exist": _set("param_groups", []),
    "parameter group that does not exist": lambda plan: plan["buckets"][0].__setitem__(
        "param_groups", [1] * len(plan["buckets"][0]["params"])
    ),
    "has parameters in no parameter group": _set("buckets", 0, "param_groups", [0] * 99),
    "the precision: wire='load' is no dtype": _set("precision", {"wire": "load"}),
    "the precision: compute='int8' is no dtype": _set("precision", {"compute": "int8"}),
    "groups..0..: 'x' is not one of": _set("precision", {"groups": {"0": {"x": "float32"}}}),
    "b0 has .*load.* which is not the plan's precision": _set("buckets", 0, "sums", "load"),
    "b1 has .*float32, which is not the plan's precision": _set("buckets", 1, "state", "float32"),
    "not the plan's precision": _set("precision", {"wire": "bfloat16"}),
    "has masters of float32, which are no wider": lambda plan: [
        plan.update(precision={"masters": "float32"}),
        *(bucket.update(master="float32", state="float32") for bucket in plan["buckets"]),
    ],
    "gradients are clipped to -1": _set("clip", -1),
    "is outside of the mesh": _set("classes", 0, "slice", "fixed", [["pp", 9]]),
    "two classes have ranks in common": _set("classes", 0, "slice", "fixed", [["pp", 1]]),
    "in no class": lambda plan: plan["mesh"]["axes"][0].__setitem__(1, 3),
    "two streams have one name": _set("streams", 1, "name", "compute"),
    "group .* has axes or slices that do not exist": _set("groups", 0, "over", ["dp", "dp"]),
    "bucket .* is of no possible size": _set("buckets", 0, "size", -1),
    "has parameters outside of it": _set("buckets", 0, "offsets", 0, 10**15),
    "result in a slot that does not exist": _set("classes", 0, "results", "loss", 10**6),
    "overlaps a task that does not exist": _set("classes", 0, "overlaps", [[10**6]]),
    "is no tensor: int64": _set("classes", 0, "slots", 0, "type", "shape", [2**40, 2**40]),
    "is no tensor: load": _set("classes", 0, "slots", 0, "type", "dtype", "load"),
    "belongs to a bucket that does not exist": _set("classes", 0, "slots", 0, "bucket", 99),
    "has a negative number": _set("classes", 0, "slots", 0, "base", -7),
    "or one has no hash for a name": _set("bodies", 0, "../../etc/passwd"),
}


@pytest.mark.parametrize("words", PLANS)
def test_plans(words: str) -> None:
    document = json.loads(plan_of("clipped").to_json())
    PLANS[words](document)
    begin = time.process_time()
    with pytest.raises(CheckError, match=words):
        check_plan(plan_from_json(json.dumps(document).encode()))
    assert time.process_time() - begin < 5


def test_explain_and_diff_refuse_what_names_nothing(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(plan_of("clipped").to_json())
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(document))
    document["classes"][0]["tasks"][0]["stream"] = 99
    bad.write_text(json.dumps(document))
    name = document["classes"][0]["tasks"][0]["name"]
    for command in (["explain", str(bad), name], ["diff", str(good), str(bad)]):
        assert main(command) == 2
        assert "CheckError: " in (error := capsys.readouterr().err)
        assert "runs on a stream that does not exist" in error


PROGRAMS: dict[str, Change] = {
    "there can be 1 to 1048576 ranks": _set("graph", "mesh", "axes", 0, 1, 10**12),
    "the batch is split into": _set("graph", "splits", 0, "num", 10**12),
    "two streams have one name": _set("graph", "streams", [{"name": "a"}, {"name": "a"}]),
    "no Value is called nothing": _set("graph", "loss", "nothing"),
}


@pytest.mark.parametrize("words", PROGRAMS)
def test_programs(words: str) -> None:
    program = program_of("tied").apply(parallel(dp=2, microbatches=2))
    document = json.loads(program.to_json())
    PROGRAMS[words](document)
    with pytest.raises(PlanError, match=words):
        program_from_json(json.dumps(document).encode())


def test_a_value_of_a_program_is_possible() -> None:
    program = program_of("tied").apply(parallel(dp=2, microbatches=2))
    for key, value in (("shape", [-1]), ("shape", [2**40, 2**40]), ("dtype", "load")):
        document = json.loads(program.to_json())
        name = next(name for name, v in document["graph"]["values"].items() if v["role"] == "param")
        document["graph"]["values"][name]["type"][key] = value
        with pytest.raises(PlanError, match=f"{name} is no tensor"):
            program_from_json(json.dumps(document).encode())


def test_a_node_of_a_program_is_placed() -> None:
    program = program_of("tied").apply(parallel(pp=2, microbatches=2))
    document = json.loads(program.to_json())
    name = next(iter(document["graph"]["nodes"]))
    del document["graph"]["nodes"][name]["slice"]
    with pytest.raises(PlanError, match="is placed nowhere"):
        program_from_json(json.dumps(document).encode())


def test_a_node_of_a_program_owns_the_axes_of_what_it_reads() -> None:
    program = program_of("tied").apply(parallel(dp=2, microbatches=2))
    document = json.loads(program.to_json())
    node = next(iter(document["graph"]["nodes"].values()))
    node["owners"] = []
    with pytest.raises(PlanError, match="which nothing owns"):
        program_from_json(json.dumps(document).encode())
