"""Pipeline schedules as data: numbers in, a table of actions per rank out."""

from __future__ import annotations

from piper.schedules.action_costs import Costs, parse_costs
from piper.schedules.catalog import SCHEDULES, as_code, describe, schedule, takes_stages_per_rank
from piper.schedules.generators.auto import auto
from piper.schedules.generators.dualpipe import dualpipe, dualpipev
from piper.schedules.generators.gpipe import gpipe, looped_bfs
from piper.schedules.generators.interleaved import interleaved_1f1b, interleaved_zb
from piper.schedules.generators.one_f_one_b import eager_1f1b, one_f_one_b
from piper.schedules.generators.v_shaped import v_half, v_min, zbv
from piper.schedules.generators.zero_bubble import zb_h1, zb_h2
from piper.schedules.legality import check
from piper.schedules.read import from_rows, parse_csv, parse_json, read_table
from piper.schedules.replay import Replay, peak_held, replay
from piper.schedules.table import Action, Cell, Table
from piper.schedules.table_timeline import draw_svg, draw_text

__all__ = [
    "SCHEDULES", "Action", "Cell", "Costs", "Replay", "Table", "as_code", "auto", "check",
    "describe", "draw_svg", "draw_text", "dualpipe", "dualpipev", "eager_1f1b", "from_rows",
    "gpipe", "interleaved_1f1b", "interleaved_zb", "looped_bfs", "one_f_one_b", "parse_costs",
    "parse_csv", "parse_json", "peak_held", "read_table", "replay", "schedule",
    "takes_stages_per_rank", "v_half", "v_min", "zb_h1", "zb_h2", "zbv",
]  # fmt: skip
