"""`piper completion`: what a shell offers behind `piper`, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from piper.cli.command_parser import CommandParser

SHELLS = ("bash", "zsh", "fish")


class Option(msgspec.Struct, frozen=True):
    """`values` may be none even where it `takes` one: a file, or a number."""

    names: tuple[str, ...]
    about: str
    takes: bool
    values: tuple[str, ...]


class Command(msgspec.Struct, frozen=True):
    """A command with the words and options that may follow it."""

    name: str
    about: str
    words: tuple[str, ...]
    options: tuple[Option, ...]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        words="bash|zsh|fish",
        help="print a script by which a shell completes piper's options",
        examples=(
            'eval "$(piper completion bash)"                         # in ~/.bashrc',
            'eval "$(piper completion zsh)"                          # in ~/.zshrc, after compinit',
            "piper completion fish > ~/.config/fish/completions/piper.fish",
        ),
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.cli.main import whole_parser

    commands = list(_commands(whole_parser()))
    if arguments.shell == "fish":
        print("\n".join(_fish(commands)))
        return 0
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print("\n".join(_bash(commands)))
    return 0


def _commands(parser: CommandParser) -> Iterator[Command]:
    from piper.cost.presets import MACHINES
    from piper.schedules import SCHEDULES

    named = {"schedule": tuple(SCHEDULES), "machine": tuple(MACHINES)}
    for name, command in parser.commands.items():
        options, words = [], list(command.commands)
        inner = command.commands.values()
        for action in (a for each in (command, *inner) for a in each.actions):
            values = tuple(map(str, action.choices or named.get(action.dest, ())))
            if action.option_strings and action.help != argparse.SUPPRESS:
                about = (action.help or "").replace("%%", "%")
                names = tuple(action.option_strings)
                options.append(Option(names, about, action.nargs != 0, values))
            elif not isinstance(action, argparse._SubParsersAction):
                words += values
        if name == "schedule":
            words += SCHEDULES
        yield Command(name, _about(parser, name), tuple(words), tuple(options))


def _about(parser: CommandParser, name: str) -> str:
    """A command's line in the help of all."""
    lines = (parser.epilog or "").splitlines()
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith(f"  {name} "))


def _bash(commands: list[Command]) -> Iterator[str]:
    yield from (
        "_piper() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local command="${COMP_WORDS[1]}" words=""',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{" ".join(c.name for c in commands)} --help --version"'
        ' -- "$word"))',
        "        return",
        "    fi",
        '    case "$command $before" in',
    )
    for command in commands:
        for option in command.options:
            case = "|".join(f'"{command.name} {name}"' for name in option.names)
            if option.takes:  # none to offer: the shell offers files
                yield f'        {case}) words="{" ".join(option.values)}"'
                yield '            COMPREPLY=($(compgen -W "$words" -- "$word")); return ;;'
    yield from ("    esac", '    case "$command" in')
    for command in commands:
        names = " ".join(name for option in command.options for name in option.names)
        yield f'        {command.name}) words="{names}"'
        yield f'            [[ "$word" == -* ]] || words="{" ".join(command.words)}" ;;'
    yield from (
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _piper piper",
    )


def _fish(commands: list[Command]) -> Iterator[str]:
    for command in commands:
        about = _quoted(command.about)
        yield f"complete -c piper -n __fish_use_subcommand -f -a {command.name} -d {about}"
    for command in commands:
        seen = f"complete -c piper -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            yield f"{seen} -a {_quoted(' '.join(command.words))}"
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            values = f" -x -a {_quoted(' '.join(option.values))}" if option.values else ""
            takes = " -r" if option.takes and not option.values else ""
            yield f"{seen} {names}{takes}{values} -d {_quoted(option.about)}"


def _quoted(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
