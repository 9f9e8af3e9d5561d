"""`piper`: parse the command line, run one command, turn the user's mistakes into one error."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from piper.errors import PiperError, Source, is_users

MISUSED = 2
COMMANDS = (
    "train", "plan", "check", "simulate", "profile", "verify", "checkpoint", "schedule", "explain",
    "diff", "show", "doctor",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="piper", description="Programmable distributed training for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if argv is None else list(argv)
    # A command imports what it needs: only the one that is asked for, if it is one.
    for command in given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS:
        importlib.import_module(f"piper.cli.{command}_command").add_parser(commands)
    arguments, unknown = parser.parse_known_args(given)
    if unknown and not _take_late(arguments, unknown):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.argv = given
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except PiperError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if arguments.debug:
            raise
        print(_user_error(error), file=sys.stderr)
        return MISUSED


def _take_late(arguments: argparse.Namespace, words: list[str]) -> bool:
    """Whether a word behind options is the last argument of its command, `late`. argparse takes one
    that may be missing for missing as soon as it comes upon an option."""
    name = getattr(arguments, "late", None)
    if name is None or getattr(arguments, name) is not None:
        return False
    if len(words) > 1 or words[0].startswith("-"):
        return False
    setattr(arguments, name, words[0])
    return True


def _user_error(error: Exception) -> str:
    """An error of the user's own code, with its line; anything else says how to see more."""
    message = f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            source = Source(os.path.abspath(frame.filename), frame.lineno or 0)
            return f"{source}: {message}\n    {frame.line}"
    return f"{message}\n  (--debug shows where)"


if __name__ == "__main__":
    sys.exit(main())
