"""CommandParser: argparse with one error for each mistake, near names, and help that shows defaults."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from piper.errors import OptionError, did_you_mean

_REQUIRED = "the following arguments are required: "


class HelpText(argparse.HelpFormatter):
    """Examples stand as they are written; an option's default is said unless its help says it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        silent = default is None or default is argparse.SUPPRESS or default in (False, "", [])
        if silent or "default" in text or not action.option_strings:
            return text
        return f"{text} (default: {default})" if text else f"default: {default}"


_MEANT = {"gpu": "cuda"}  # what people write, where no known name is nearly written so


class CommandParser(argparse.ArgumentParser):
    """A command's parser. What is wrong on its command line is an OptionError, raised."""

    def __init__(
        self, *positional: Any, examples: Iterable[str] = (), words: str = "", **named: Any
    ) -> None:
        """`words` are what its usage line shows behind the name, in place of all options."""
        named.setdefault("formatter_class", HelpText)
        if examples:
            named["epilog"] = "\n".join(["examples:", *(f"  {line}" for line in examples)])
        super().__init__(*positional, **named)
        if words:
            self.usage = f"%(prog)s {words}"

    def error(self, message: str) -> NoReturn:
        legal = f"see {self.prog} --help"
        if message.startswith(_REQUIRED):
            raise OptionError(f"{self.prog} needs {message.removeprefix(_REQUIRED)}", legal=legal)
        raise OptionError(f"{self.prog}: {message.removeprefix('argument ')}", legal=legal)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        name = "/".join(action.option_strings) or action.metavar or action.dest
        near = did_you_mean(_MEANT.get(str(value).lower(), str(value)), known)
        raise OptionError(f"{self.prog}: {name} {value}{near}", legal=", ".join(known))

    @property
    def actions(self) -> list[argparse.Action]:
        return self._actions

    @property
    def groups(self) -> list[Any]:
        """Groups of options with a title, as help shows them."""
        return self._action_groups

    @property
    def commands(self) -> dict[str, CommandParser]:
        """By name, if it has any."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def option(self, name: str) -> argparse.Action | None:
        return self._option_string_actions.get(name)

    def converted(self, action: argparse.Action, text: str) -> Any:
        """What a text means as the option's value; the message of an error goes behind both."""
        try:
            value = self._get_value(action, text)
        except argparse.ArgumentError as error:
            raise OptionError(f": {error.message}", legal=f"see {self.prog} --help") from None
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise OptionError(did_you_mean(text, known), legal=", ".join(known))
        return value

    def check_options(self, words: Sequence[str]) -> None:
        """Refuse a name that no option has, before anything else is said to be missing."""
        inner = next((self.commands[word] for word in words if word in self.commands), self)
        known = [name for action in inner.actions for name in action.option_strings]
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if word.startswith("--") and not any(each.startswith(name) for each in known):
                raise OptionError(
                    f"{inner.prog} has no option {name}{did_you_mean(name, known)}",
                    legal=f"see {inner.prog} --help",
                )


def choose_command(word: str, known: Sequence[str]) -> NoReturn:
    """There is no such command."""
    raise OptionError(
        f"piper has no command {word!r}{did_you_mean(word, known)}", legal=", ".join(known)
    )
