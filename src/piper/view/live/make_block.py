"""A timeline with its plan as bytes on stdin; the block of its report, deflated, on stdout."""

from __future__ import annotations

import os
import sys
import zlib

from piper.observe.timeline_files import from_bytes
from piper.plan.types import plan_from_json
from piper.view.report_data import Shown, report_block

NICE = 10  # training goes first
LEVEL = 1


def main(name: str, title: str) -> None:
    os.nice(NICE)
    timeline = from_bytes(sys.stdin.buffer.read())
    plan = plan_from_json(timeline.plan_json)
    block = report_block([Shown(name, timeline)], plan=plan, title=title)
    sys.stdout.buffer.write(zlib.compress(block, LEVEL))


if __name__ == "__main__":
    main(*sys.argv[1:])
