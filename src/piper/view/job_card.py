"""Job card: a plan and a machine in; a few lines of HTML for a notebook out."""

from __future__ import annotations

from html import escape

from piper.check import most_bytes
from piper.cost.machine import Machine
from piper.insight.step_text import show_seconds
from piper.ir.form.byte_sizes import show_size
from piper.ir.form.card import card
from piper.observe.pictures.svg import draw_svg
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.view.in_place import in_place
from piper.view.show import show_html
from piper.view.step_shares import step_shares
from piper.view.strategy_line import strategy_line

_WIDTH = 960
_STEPS = 2


def job_card(plan: Plan, machine: Machine) -> str:
    timeline = simulate(plan, machine, steps=_STEPS)
    shares = step_shares(timeline, _STEPS - 1)
    figures = {
        "ranks": str(plan.mesh.size),
        f"step on {machine.name}, simulated": show_seconds(shares.seconds),
        "peak memory": show_size(most_bytes(plan)),
        "computes": f"{shares.ranks.computing:.0%}",
        "exposed communication": f"{shares.ranks.exposed:.0%}",
        "bubble": f"{shares.ranks.bubble:.0%}",
    }
    cells = "".join(
        f'<td style="text-align:left;padding-right:20px"><small>{escape(name)}</small>'
        f"<br><b>{escape(value)}</b></td>"
        for name, value in figures.items()
    )
    begin, end = timeline.steps[-1]
    picture = draw_svg(timeline, begin=begin, end=end, width=_WIDTH)
    report = in_place(show_html(plan, machine=machine))
    return card(strategy_line(plan), f"<table><tr>{cells}</tr></table>", picture, report)
