"""Job files: options of a command from TOML in, checked values for its parser out."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from piper.cli.command_parser import CommandParser
from piper.errors import Call, FileError, OptionError, Source, did_you_mean
from piper.files import read_text

TAKEN_BY = ("train", "plan", "verify", "simulate", "profile")
MODEL = "file"  # the key of the model's file
_MEANT_MODEL = ("model", "program", "script", "path")
_OTHERWISE = ("steps", "launch")  # options that mean something else in a command that is not train
_PATHS = (MODEL, "data", "strategy", "weights", "checkpoint", "record", "out", "predicted")
_LIST = "_of_the_job_file"  # behind the name of an option that may be given several times
_NAME = "job file"
_MAYBE_PATHS = ("machine", "schedule")  # or names


class Entry(msgspec.Struct, frozen=True):
    """A line of the file."""

    key: str
    value: Any
    call: Call


def config_word(command: str, words: Sequence[str]) -> str | None:
    """The .toml file among the words of a command line, if the command takes one."""
    found = [word for word in words if word.endswith(".toml") and not word.startswith("-")]
    if command not in TAKEN_BY or not found:
        return None
    if len(found) > 1:
        raise OptionError(f"two job files: {', '.join(found)}", legal="one FILE.toml")
    return found[0]


def configure(parser: CommandParser, train: CommandParser, path: str) -> str:
    """Make what a job file says the defaults of a command, and give the model's file.

    The keys are options of `piper train`, alone or in tables that are called as its groups of options
    are. A table that is called as a command has options for that command alone.
    """
    command = parser.prog.split()[-1]
    model = ""
    for own, entry in _entries(path, train, command):
        reader = parser if own else train
        if entry.key == MODEL:
            model = _beside(path, _text(entry), sure=True)
            continue
        action = reader.option(f"--{entry.key}")
        if action is None or action.dest == "help":
            names = [MODEL, *(name[2:] for a in reader.actions for name in a.option_strings)]
            meant = MODEL if entry.key in _MEANT_MODEL else entry.key
            raise OptionError(
                f"no option is called {entry.key!r}{did_you_mean(meant, names)}",
                call=entry.call,
                legal=f"see {reader.prog} --help",
            )
        value = _value(reader, action, entry, path)
        if own or (command == "train" or entry.key not in _OTHERWISE):
            _set_default(parser, action, value)
    if not model:
        raise FileError(
            f"{path} does not name the model's file", legal=f'{MODEL} = "model.py", beside {path}'
        )
    return model


def _entries(path: str, train: CommandParser, command: str) -> Iterator[tuple[bool, Entry]]:
    """Each key, and whether it is for this command alone."""
    text = read_text(path)
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits, too many brackets
        raise FileError(f"{path} is no TOML: {error}", legal="lines such as  pp = 2") from None
    groups = [
        group.title for group in train.groups[2:] if group.title
    ]  # those that argparse makes aside
    for key, value in found.items():
        if not isinstance(value, dict):
            yield False, _entry(path, text, None, key, value)
            continue
        if key not in (*groups, *TAKEN_BY):
            known = [*TAKEN_BY, *groups]
            raise OptionError(
                f"no command and no group of options is called {key!r}{did_you_mean(key, known)}",
                call=_call(path, text, None, key),
                legal=", ".join(f"[{name}]" for name in known),
            )
        if key in groups or key == command:
            for inner, each in value.items():
                yield key == command, _entry(path, text, key, inner, each)


def _entry(path: str, text: str, table: str | None, key: str, value: Any) -> Entry:
    return Entry(key.replace("_", "-"), value, _call(path, text, table, key))


def _call(path: str, text: str, table: str | None, key: str) -> Call:
    """With the line of a key. tomllib tells none, so it is the first that looks like it."""
    inside: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[\[?\s*\"?([\w-]+)", line)
        inside = head[1] if head else inside
        if head and table is None and head[1] == key:
            return _at(path, number)
        name = re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]", line)
        if name and name[1] == key and inside == table:
            return _at(path, number)
    return Call(_NAME)


def _at(path: str, line: int) -> Call:
    return Call(_NAME, Source(os.path.abspath(path), line))


def _value(parser: CommandParser, action: argparse.Action, entry: Entry, path: str) -> Any:
    """What the option is given, as if it stood on the command line."""
    flag, several = action.nargs == 0, isinstance(action, argparse._AppendAction)
    if flag != isinstance(entry.value, bool):
        legal = "true or false" if flag else "a value, not true or false"
        raise OptionError(f"{entry.key} = {entry.value!r}", call=entry.call, legal=legal)
    if flag:
        return action.const if entry.value else action.default
    if isinstance(entry.value, list) and not several:
        raise OptionError(
            f"{entry.key} takes one value, not a list", call=entry.call, legal=f"{entry.key} = ..."
        )
    values = entry.value if isinstance(entry.value, list) else [entry.value]
    found = []
    for each in values:
        if isinstance(each, str) and entry.key in (*_PATHS, *_MAYBE_PATHS):
            each = _beside(path, each, sure=entry.key in _PATHS)
        try:
            found.append(parser.converted(action, str(each)))
        except OptionError as error:
            message = f"{entry.key} = {each!r}{error.message}"
            raise OptionError(message, call=entry.call, legal=error.legal) from None
    return found if several else found[0]


def _beside(path: str, name: str, *, sure: bool) -> str:
    """A name of a file in the job file, which is beside that; of what may also be no file, if it is."""
    beside = os.path.join(os.path.dirname(path), name)
    return beside if sure or os.path.exists(beside.partition(".py:")[0]) else name


def _text(entry: Entry) -> str:
    if not isinstance(entry.value, str):
        raise OptionError(
            f"{entry.key} = {entry.value!r}", call=entry.call, legal='a file: "model.py"'
        )
    return entry.value


def _set_default(parser: CommandParser, wanted: argparse.Action, value: Any) -> None:
    """What the command line does not say; it may also turn a flag off that the file turns on."""
    action = parser.option(wanted.option_strings[-1])
    if action is None:  # it is train's alone
        return
    if action.nargs == 0:
        off = f"--no-{action.option_strings[-1][2:]}"
        parser.add_argument(
            off, dest=action.dest, action="store_const", const=action.default,
            help=argparse.SUPPRESS, default=argparse.SUPPRESS,
        )  # fmt: skip
    action.required = False
    if isinstance(action, argparse._AppendAction):
        parser.set_defaults(**{f"{action.dest}{_LIST}": value})
    else:
        action.default = value


def fill_lists(arguments: argparse.Namespace) -> None:
    """Options that may be given several times are the job file's, unless the command line has some."""
    for name, value in list(vars(arguments).items()):
        if name.endswith(_LIST):
            own = name.removesuffix(_LIST)
            setattr(arguments, own, getattr(arguments, own) or value)
            delattr(arguments, name)
