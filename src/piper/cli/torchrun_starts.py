"""Torchrun starts: an elastic training's command in; it is run anew until it is done, or will not be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TERMINATED = 143
MISTAKE = "PIPER_MISTAKE"  # names the file by which a rank says that another start would end alike


def mistaken() -> None:
    """In a rank: its error is the user's."""
    if MISTAKE in os.environ:
        Path(os.environ[MISTAKE]).touch()


def start_until_done(
    command: list[str], folder: str, start: Callable[[list[str], dict[str, str]], int] | None = None
) -> int:
    """The exit code of the last start: the one that trained to the end, had a mistake of the user's or
    was asked to end, or brought as the third in a row no newer checkpoint in the folder."""
    from piper.stored.folders import latest
    from piper.training.elastic import IN_A_ROW

    start, in_a_row = start or _start, 0
    with tempfile.TemporaryDirectory() as room:
        mistake = Path(room) / "mistake"
        while True:
            before = latest(folder)
            code = start(command, {**os.environ, MISTAKE: str(mistake)})
            if code in (0, TERMINATED) or mistake.exists():
                return code
            newest = latest(folder)
            in_a_row = in_a_row + 1 if newest == before else 0
            if in_a_row == IN_A_ROW:
                _say(f"{IN_A_ROW} starts in a row brought no newer checkpoint than {newest}")
                return code
            _say(f"ranks were lost: all are started anew, from {newest or 'the beginning'}")


def _start(command: list[str], environment: dict[str, str]) -> int:
    """Its exit code, or TERMINATED if this process was asked to end, and with it the other."""
    asked: list[int] = []
    process = subprocess.Popen(command, env=environment)

    def end(number: int, _: Any) -> None:
        asked.append(number)
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the other has heard it, too
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return TERMINATED if asked else code


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
