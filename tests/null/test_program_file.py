"""A program as a file: what is saved is loaded, and what no longer fits is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import piper
from piper import Schedule, where
from piper.api.program_file import program_from_json
from piper.errors import CutError, FileError, PiperError, PlanError, TraceError
from piper.plan.types import Plan
from tests.null.test_history import everything
from tests.strategies import strategy_of
from tests.zoo import CASES, program_of

pytestmark = pytest.mark.xdist_group("moe")


def load(program: piper.Program, folder: Path, *model: Any) -> piper.Program:
    program.save(folder / "program.json")
    return piper.load_program(folder / "program.json", *model)


@pytest.fixture(scope="module")
def applied() -> piper.Program:
    return program_of("moe").apply(everything)


def test_a_program_can_be_looked_at_without_its_model(
    applied: piper.Program, tmp_path: Path
) -> None:
    loaded = load(applied, tmp_path)
    assert loaded.graph == applied.graph and loaded.history == applied.history
    assert loaded.to_json() == applied.to_json()
    assert loaded.as_text() == applied.as_text()
    assert loaded.history_as_code() == applied.history_as_code()
    assert loaded.history.listing() == applied.history.listing()
    assert loaded.preview(clip=1.0) == applied.preview(clip=1.0)
    assert "all_to_all" in loaded.preview()


def test_it_is_exported_and_compared_without_its_model(tmp_path: Path) -> None:
    program = program_of("moe").apply(strategy_of("pp2_dp2", "1f1b"))
    loaded = load(program, tmp_path)
    assert piper.strategies.to_json(loaded) == piper.strategies.to_json(program)
    assert loaded.diff(program) == program.diff(loaded) == ""
    other = program_of("moe").apply(strategy_of("dp2", "none"))
    assert "mesh pp=2 dp=2 ep=1 -> pp=1 dp=2 ep=1" in loaded.diff(other)


def test_directives_go_on_where_the_file_ends(tmp_path: Path) -> None:
    loaded = load(program_of("moe"), tmp_path)
    again = loaded.apply(everything)
    assert again.graph == program_of("moe").apply(everything).graph
    with pytest.raises(CutError, match="without its model"):
        loaded.apply(lambda s: s.cut("STAGE", 2))


def test_lowering_needs_the_model(applied: piper.Program, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="read from a file, without its model") as caught:
        load(applied, tmp_path).lower()
    assert "legal: piper.load_program(path, make_model, example_batch, step)" in str(caught.value)


def plan_hash(plan: Plan) -> str:
    return msgspec.structs.replace(plan, history=()).content_hash()


@pytest.mark.parametrize("name", ["moe", "untagged"])
def test_with_its_model_it_lowers_to_the_same_plan(name: str, tmp_path: Path) -> None:
    program = program_of(name).apply(piper.strategies.parallel(pp=2, dp=2, microbatches=2))
    case = CASES[name]
    loaded = load(program, tmp_path, case.model, case.batch(0), case.step)
    assert loaded.history == program.history
    assert loaded.lower().plan.content_hash() == program.lower().plan.content_hash()


def test_a_program_of_another_model_is_refused(applied: piper.Program, tmp_path: Path) -> None:
    case = CASES["skip"]
    with pytest.raises(PiperError, match="another model, batch or step") as caught:
        load(applied, tmp_path, case.model, case.batch(0), case.step)
    assert isinstance(caught.value, TraceError) and len(caught.value.details) > 1


def test_a_history_is_a_strategy_for_another_model(tmp_path: Path) -> None:
    loaded = load(program_of("moe").apply(strategy_of("dp2", "none")), tmp_path)
    other = program_of("skip").apply(loaded.history)
    assert other.history_as_code() == loaded.history_as_code()
    wanted = program_of("skip").apply(strategy_of("dp2", "none"))
    assert plan_hash(other.lower().plan) == plan_hash(wanted.lower().plan)


def test_pieces_need_the_model(tmp_path: Path) -> None:
    def strategy(s: Schedule) -> None:
        s.mesh(dp=2)
        s.replicate(where(), over="dp", zero=2, bucket_size=300)

    with pytest.raises(PlanError, match="bucket_size cuts chunks"):
        load(program_of("moe").apply(strategy), tmp_path).preview()


def _change(path: str, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        *folders, last = path.split("/")
        for key in folders:
            data = data[int(key)] if isinstance(data, list) else data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_change("version", 99), "a program of version 99 is not readable"),
        (_change("graph/level", "physical"), "not a logical one"),
        (_change("graph/nodes/F[PP=0.0,MB=0]/origin", 99), "F[PP=0.0,MB=0] comes from directive 99"),
        (_change("graph/orders", [{"groups": [], "origin": -2}]), "an order comes from directive -2"),
        (_change("graph/nodes/B[PP=0.0,MB=0]/forward", "F"), "is the backward of no forward"),
        (_change("graph/nodes/F[PP=0.0,MB=0]/name", "x"), "filed under another name"),
        (_change("history/0/directive/kind", 3), "an object with a `kind`"),
        (_change("history/0/effect", []), "not a Piper program"),
    ],
)  # fmt: skip
def test_files_that_are_no_program(
    applied: piper.Program, change: Callable[[Any], None], words: str
) -> None:
    data = json.loads(applied.to_json())
    change(data)
    with pytest.raises(PlanError) as caught:
        program_from_json(json.dumps(data).encode())
    assert words in str(caught.value)


def test_a_missing_file_and_half_a_model(applied: piper.Program, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"there is no file .*none.json"):
        piper.load_program(tmp_path / "none.json")
    with pytest.raises(PlanError, match="a model goes with its step"):
        load(applied, tmp_path, CASES["moe"].model)


def test_mutated_files_are_refused_or_loaded(applied: piper.Program) -> None:
    """Bytes at random: one Piper error, or a program that prints and previews."""
    data = applied.to_json()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(len(mutant))] = rng.choice(b'0123456789{}[]",:xeF')
        try:
            saved = program_from_json(bytes(mutant))
            loaded = piper.Program(None, saved.graph, saved.history)
            assert loaded.as_text() and loaded.history_as_code()
        except PiperError:
            refused += 1
    assert refused > 50
