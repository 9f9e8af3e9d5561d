"""`piper`: parse the command line, run one command, turn the user's mistakes into one error."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from piper.cli import (
    check_command,
    checkpoint_command,
    diff_command,
    doctor_command,
    explain_command,
    plan_command,
    schedule_command,
    train_command,
    verify_command,
)
from piper.errors import PiperError, Source, is_users

MISUSED = 2
_COMMANDS = (
    train_command,
    plan_command,
    check_command,
    verify_command,
    checkpoint_command,
    schedule_command,
    explain_command,
    diff_command,
    doctor_command,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="piper", description="Programmable distributed training for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else list(argv)
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
