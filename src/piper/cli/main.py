"""`piper`: parse the command line, run one command, turn the user's mistakes into one error."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

import piper
from piper.cli.command_parser import CommandParser, choose_command
from piper.cli.error_output import tell
from piper.cli.job_config import config_word, configure, fill_lists
from piper.cli.json_output import only_json
from piper.cli.stage_lines import INTERRUPTED
from piper.errors import OptionError, PiperError

MISUSED = 2
GROUPS = {  # of commands, as help lists them
    "train": ("train", "verify", "checkpoint"),
    "before training": ("plan", "check", "simulate", "schedule"),
    "look into it": ("show", "explain", "diff", "profile"),
    "this machine": ("doctor", "completion"),
}
_EXAMPLES = (
    "piper doctor",
    "piper train FILE.py --steps 100 --dp 2",
    "piper verify FILE.py --pp 2 --dp 2 --zero 2 --microbatches 4",
    "piper plan FILE.py --pp 2 --schedule zb_h1 --microbatches 4",
)
COMMANDS = tuple(command for commands in GROUPS.values() for command in commands)


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    _open_closed()
    try:
        arguments = parsed(given)
    except OptionError as error:
        tell(error, given, None)
        sys.exit(MISUSED)
    except PiperError as error:  # of a job file
        tell(error, given, None)
        return MISUSED
    try:
        with only_json(getattr(arguments, "json", False)):
            code = arguments.run(arguments)
        sys.stdout.flush()
        return _interrupted() if code == INTERRUPTED else code
    except PiperError as error:
        if arguments.debug:
            traceback.print_exc()
        tell(error, given, arguments)
        return MISUSED
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if arguments.debug:
            raise
        tell(error, given, arguments)
        return MISUSED


def _interrupted() -> int:
    """The process ends. Another interrupt ends it at once: torch would speak of its exit handlers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return INTERRUPTED


def _open_closed() -> None:
    """What a shell has closed (`>&-`) takes everything, and keeps nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """What the command line says, with what its job file says."""
    if given and given[0] == "help":  # as other programs have it
        given = [*given[1:2], "--help"]
    named = given[0] if given and not given[0].startswith("-") else None
    if named is not None and named not in COMMANDS:
        choose_command(named, COMMANDS)
    # A command imports what it needs: only the one that is asked for, if it is one.
    parser = whole_parser(COMMANDS if named is None else (named,))
    words = list(given)
    if named is not None:
        words = _configured(parser.commands[named], words)
    elif not given:
        words = ["--help"]
    (parser if named is None else parser.commands[named]).check_options(words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown and not _take_late(arguments, unknown):
        its = parser.commands.get(named or "", parser)
        its.error(f"{' '.join(unknown)}: there is no place for it")
    fill_lists(arguments)
    arguments.argv = list(given)
    return arguments


def whole_parser(commands: Sequence[str] = COMMANDS) -> CommandParser:
    """Of `piper`, with these commands."""
    parser = CommandParser(
        prog="piper",
        words="COMMAND ...",
        description="Programmable distributed training for PyTorch. "
        "`piper COMMAND --help` has the options and examples of a command.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print this version, torch's and Python's"
    )
    added = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="piper"
    )
    for command in commands:
        importlib.import_module(f"piper.cli.{command}_command").add_parser(added)
    about = {action.dest: action.help for action in added._choices_actions}
    lines: list[str] = []
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12}{about.get(name, '')}" for name in names), ""]
    parser.epilog = "\n".join([*lines, "examples:", *(f"  {line}" for line in _EXAMPLES)])
    return parser


class _Version(argparse.Action):
    """Looks for versions only when it is asked to."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"piper {piper.__version__} (torch {torch}, Python {python})")
        parser.exit()


def _configured(parser: CommandParser, words: list[str]) -> list[str]:
    """The words with the model's file for a job file, whose options are the parser's defaults."""
    path = config_word(words[0], words)
    if path is None:
        return words
    train = parser if words[0] == "train" else whole_parser(("train",)).commands["train"]
    file = configure(parser, train, path)
    return [file if word == path else word for word in words]


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


if __name__ == "__main__":
    sys.exit(main())
