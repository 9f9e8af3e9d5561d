"""Random programs: legal ones train like one device, illegal ones are refused with their line.

`make fuzz` runs more of them, other ones each time; PIPER_FUZZ is their number. A failure prints the
program. With PIPER_FUZZ_SHRINK=1 Hypothesis draws every choice itself and makes a failing program
small; else it draws seeds, which gives more different programs.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from piper.api.program import Program
from piper.api.program_file import program_from_json
from piper.errors import PiperError
from piper.training.verify import compare

from .coverage import combination, cover
from .models import batches, make, reference_of, spec_of
from .programs import FILE, Strategy, random_strategy, with_communication
from .violations import VIOLATIONS, random_violation

EXAMPLES = int(os.environ.get("PIPER_FUZZ", "0"))
SHRINK = bool(os.environ.get("PIPER_FUZZ_SHRINK"))
FIRST = int(os.environ.get("PIPER_FUZZ_MODELS", "0"))  # the number of the first model
SPECS = [spec_of(FIRST + number) for number in range(40 if EXAMPLES else 8)]
SPECS += [
    spec for spec in SPECS if "moe" in spec.kinds and not spec.random_experts
]  # twice as often
ROWS = () if EXAMPLES else (2, 4)  # few sizes of microbatches: each costs a trace of all bodies

RANDOM = st.randoms(use_true_random=not SHRINK)


def profile(examples: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
        suppress_health_check=list(HealthCheck),
    )


HALVES_AGAIN = frozenset({"recompute expensive", "halves", "EP"})  # together they once went wrong
NORMED = [spec for spec in SPECS if "normed_experts" in spec.features and not spec.random_experts]


def halves_again(rng: Random) -> Strategy:
    """A program whose experts are sharded, and whose backwards compute again and come in halves."""
    while True:
        strategy = random_strategy(rng, NORMED, ROWS)
        if strategy.facts >= HALVES_AGAIN and strategy.facts & {"zero 2", "zero 3"}:
            return strategy


@pytest.mark.timeout(0 if EXAMPLES else 600)
@profile(30)
@given(RANDOM)
def test_a_legal_program_trains_like_one_device(rng: Random) -> None:
    trains_like_one_device(random_strategy(rng, SPECS, ROWS), rng)


@pytest.mark.timeout(0 if EXAMPLES else 600)
@profile(5)
@given(RANDOM)
def test_halves_that_compute_again_train_like_one_device(rng: Random) -> None:
    trains_like_one_device(halves_again(rng), rng)


def trains_like_one_device(strategy: Strategy, rng: Random) -> None:
    note(repr(strategy))
    cover("legal", strategy)
    program = strategy.apply()
    job = strategy.lowered(program)
    assert again(program).graph == program.graph
    reference = reference_of(strategy.spec, job)
    with job.launch("loopback", adversary=True, seed=rng.randrange(100)) as run:
        errors = compare(run, batches(), reference)
        names = set(run.parameters())
    assert errors.exact, errors
    assert names == {name for name, _ in make(strategy.spec).named_parameters()}


def again(program: Program) -> Program:
    """The program as its history, through JSON, makes it anew."""
    saved = program_from_json(program.to_json())
    assert (saved.graph, saved.history) == (program.graph, program.history)
    return Program(program.source, program.source.graph()).apply(saved.history)


@pytest.mark.timeout(0 if EXAMPLES else 600)
@profile(20)
@given(RANDOM)
def test_an_order_of_communication_is_refused_with_its_line_or_right(rng: Random) -> None:
    strategy = with_communication(rng, random_strategy(rng, SPECS, ROWS))
    note(repr(strategy))
    try:
        job = strategy.lower()
    except PiperError as error:
        last = strategy.source_line(len(strategy.lines) - 1)
        lines = [strategy.source_line(index) for index in strategy.lines_of("order")]
        assert error.call is not None and error.call.source is not None, error
        assert error.call.source.line in (lines if "contradict" in str(error) else [last]), error
        return
    cover("legal", strategy, "order of communication")
    with job.launch("loopback", adversary=True, seed=rng.randrange(100)) as run:
        errors = compare(run, batches(), reference_of(strategy.spec, job))
    assert errors.exact, errors


@pytest.mark.timeout(0 if EXAMPLES else 600)
@profile(80)
@given(RANDOM)
def test_an_illegal_program_is_refused_with_its_line(rng: Random) -> None:
    program = random_violation(random_strategy(rng, SPECS, ROWS), rng)
    note(repr(program))
    cover("illegal", program.strategy, f"violation {program.kind}")
    with pytest.raises(PiperError) as caught:
        program.strategy.lower()
    error = caught.value
    assert error.call is not None and error.call.source is not None, error
    assert error.call.source.file == FILE, error
    assert error.call.source.line in program.source_lines, error
    assert f"{os.path.basename(FILE)}:{error.call.source.line}" in str(error)


def test_programs_differ() -> None:
    """Seeds give different programs, and nearly every kind of violation."""
    rng, specs = Random(0), [spec_of(number) for number in range(8)]
    combinations, violations = set(), set()
    for _ in range(220):
        strategy = random_strategy(rng, specs, (2, 4))
        combinations.add(combination(strategy))
        violations.add(random_violation(strategy, rng).kind)
    assert len(combinations) > 176
    assert len(violations) > len(VIOLATIONS) - 5
