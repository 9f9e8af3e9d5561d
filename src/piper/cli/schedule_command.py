"""`piper schedule`: a schedule by name, or a table of the user's own, drawn, replayed and checked."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from typing import Any

import msgspec

from piper.cli.user_file import schedule_function
from piper.errors import FileError, OptionError
from piper.schedules import SCHEDULES, Costs, Table, describe, parse_costs, read_table, replay
from piper.schedules import schedule as make_table
from piper.schedules.catalog import is_file
from piper.schedules.formulas import bubble_formula, memory_formula
from piper.schedules.read import VERSION
from piper.schedules.replay import Replay
from piper.schedules.table_timeline import draw_svg, draw_text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "schedule",
        words="NAME|FILE [options]",
        examples=(
            "piper schedule --list",
            "piper schedule dualpipev --ranks 4 --microbatches 8",
            "piper schedule zb_h1 --costs F=1,BI=1,BW=0.5,comm=0.1",
            "piper schedule mine.csv                                  # is it legal?",
        ),
        help="draw, replay and check a pipeline schedule",
        description="Draw and replay a schedule by name, or check a table of your own.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME|FILE",
        help="see --list; or FILE.csv, FILE.json, FILE.py:FUNCTION",
    )
    parser.add_argument("--list", action="store_true", help="list the schedules by name")
    parser.add_argument(
        "--ranks", "--pp", type=int, metavar="N", help="pipeline ranks (default: 4)"
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="microbatches (default: twice the ranks)"
    )
    parser.add_argument(
        "--stages-per-rank",
        type=int,
        metavar="V",
        help="for schedules that let you choose (default: as usual)",
    )
    parser.add_argument(
        "--costs", default="", metavar="F=..,BI=..,BW=..,comm=..",
        help="times (default: 1, and 0 for comm); also B= and F&B=; F=1:1.2 gives each stage its own",
    )  # fmt: skip
    parser.add_argument(
        "--max-in-flight", type=float, metavar="K", help="auto: microbatches a rank may hold"
    )
    parser.add_argument(
        "--kept",
        type=float,
        metavar="SHARE",
        help="auto: share of a microbatch held from BI to BW (default: 1)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "csv", "json", "svg"),
        default="text",
        help="of what is printed",
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="of the text form"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        print(_list(), end="")
        return 0
    if arguments.name is None:
        raise FileError("which schedule?", legal="piper schedule NAME, or piper schedule --list")
    costs = parse_costs(arguments.costs) if arguments.costs else Costs()
    table = _table(arguments, costs)
    replayed = replay(table, costs)
    # Formulas are of the schedules by name, not of tables that are called like them.
    named = arguments.name in SCHEDULES
    if arguments.format == "csv":
        print(table.as_csv(), end="")
    elif arguments.format == "svg":
        print(draw_svg(table, replayed), end="")
    elif arguments.format == "json":
        print(json.dumps(_facts(table, costs, replayed, named), allow_nan=False))
    else:
        color = arguments.color == "always" or (
            arguments.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        )
        width = shutil.get_terminal_size((100, 24)).columns
        print(draw_text(table, replayed, width=width, color=color))
        formulas = _formulas(table, costs, replayed) if named else []
        print("\n".join([*_summary(table, costs, replayed), *formulas]))
    return 0


def _table(arguments: argparse.Namespace, costs: Costs) -> Table:
    name, ranks, microbatches = arguments.name, arguments.ranks, arguments.microbatches
    options: dict[str, Any] = {"costs": costs} if name == "auto" else {}
    for option in ("max_in_flight", "kept"):
        if getattr(arguments, option) is not None:
            if name != "auto":
                raise OptionError(
                    f"--{option.replace('_', '-')} is not for {name}", legal="piper schedule auto"
                )
            options[option] = getattr(arguments, option)
    found: Any = schedule_function(name)
    if isinstance(found, str) and is_file(found):
        found = read_table(found)
        ranks = found.num_ranks if ranks is None else ranks
        microbatches = found.num_microbatches if microbatches is None else microbatches
    ranks = 4 if ranks is None else ranks
    return make_table(
        found,
        num_ranks=ranks,
        num_microbatches=2 * ranks if microbatches is None else microbatches,
        stages_per_rank=arguments.stages_per_rank,
        **options,
    )


def _list() -> str:
    text = ""
    for name in SCHEDULES:
        about = describe(name)
        text += f"{name:<17} {about.summary}\n{'':<17} {about.placement}; bubble {about.bubble}; "
        text += f"holds {about.memory}\n"
        if about.requires:
            text += f"{'':<17} requires {about.requires}\n"
    return text + (
        "\nPP ranks, r the rank, M microbatches (K a round), V stages per rank; F, B, BI, BW and F&B\n"
        "are the times of a stage. A rank holds a microbatch of a stage from its F to its B or BW.\n"
    )


def _summary(table: Table, costs: Costs, replayed: Replay) -> list[str]:
    place = " in 2 directions" if table.num_directions == 2 else ""
    return [
        f"{table.name}: {table.num_ranks} ranks, {table.num_stages} stages{place}, "
        f"{table.num_microbatches} microbatches; costs {costs}",
        f"makespan  {_number(replayed.makespan)}, busy {_numbers(replayed.busy)}",
        f"bubble    {replayed.bubble_of_makespan:.2%} of the makespan (mean idle time of a rank)",
        f"          {replayed.bubble_of_span:.2%} of the longest span of a rank, "
        f"{_number(replayed.span)} (bubble rate of the zero-bubble paper)",
        f"holds     at most {_numbers(replayed.peak_in_flight)} (microbatches, once per stage)",
    ]


def _formulas(table: Table, costs: Costs, replayed: Replay) -> list[str]:
    """What the papers say beside the replay."""
    about, memory = describe(table.name), memory_formula(table)
    if memory is None:
        return []
    bubble = bubble_formula(table, costs)
    by_replay = _number(replayed.span - sum(replayed.busy) / table.num_ranks)
    value = "none at these numbers" if bubble is None else _number(bubble)
    exact = costs.comm == 0 and costs.F == costs.BI == costs.BW and costs.B is costs.FB is None
    return [
        f"formula   bubble {about.bubble}: {value}; by replay {by_replay}"
        + ("" if exact else " (exact at equal F, BI and BW, their sums for B and F&B, and comm=0)"),
        f"          holds {about.memory}: {_numbers(memory)}",
    ]


def _facts(table: Table, costs: Costs, replayed: Replay, named: bool) -> dict[str, Any]:
    return {
        "version": VERSION,
        "name": table.name,
        "num_ranks": table.num_ranks,
        "num_stages": table.num_stages,
        "num_microbatches": table.num_microbatches,
        "num_directions": table.num_directions,
        "placement": [list(ranks.values()) for ranks in table.placement()],
        "rows": [[str(cell) for cell in row] for row in table.rows],
        "costs": msgspec.to_builtins(costs),
        "replay": {
            "makespan": replayed.makespan,
            "span": replayed.span,
            "busy": replayed.busy,
            "peak_in_flight": replayed.peak_in_flight,
            "bubble_of_makespan": replayed.bubble_of_makespan,
            "bubble_of_span": replayed.bubble_of_span,
            "starts": replayed.starts,
            "ends": replayed.ends,
        },
        "formula": {
            "bubble": bubble_formula(table, costs) if named else None,
            "memory": memory_formula(table) if named else None,
        },
    }


def _numbers(numbers: list[Any]) -> str:
    """`4 3 2 1`, or one number if all are the same."""
    shown = [_number(number) for number in numbers]
    return f"{shown[0]} on every rank" if len(set(shown)) == 1 else " ".join(shown)


def _number(number: float) -> str:
    """Without the noise of sums of times."""
    return f"{round(number, 9):.10g}"
