"""Command-line parser that reports errors briefly: the error, a suggestion, then one line of usage."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

EXIT_USAGE = 2


class CommandParser(argparse.ArgumentParser):
    """:class:`argparse.ArgumentParser` that rejects unknown arguments itself and names similar options.

    ``parse_known_args`` is strict, too: a subcommand reports its own unknown options, not those of its parent.
    """

    _given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if "are required" in message:  # one of the required options may be there, misspelt
            strange = [each for each in self._given if each.startswith("--") and not self._is_known(each)]
            message = "; ".join(filter(None, [_describe_options(strange, list(self._option_string_actions)), message]))
        print(f"{self.prog}: error: {message}\n{self._usage_line()}", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def parse_known_args(  # type: ignore[override]  # the base class has overloads for namespaces of other types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_describe_unknown(unknown, list(self._option_string_actions)))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            advice = did_you_mean(str(value), choices) or f"; choose one of {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}{advice}")

    def _is_known(self, argument: str) -> bool:
        name = argument.partition("=")[0]
        return any(option.startswith(name) for option in self._option_string_actions)

    def _usage_line(self) -> str:
        positionals = [_placeholder(action) for action in self._actions if not action.option_strings]
        return f"usage: {' '.join([self.prog, '[OPTIONS]', *positionals])}; {self.prog} --help explains it"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the known name closest to ``name``, "" if none is close."""
    close = closest(name, known)
    return f"; did you mean {close}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name closest to ``name``, "" if none is close. Dashes equal underscores."""
    plain = {_plain(each): each for each in known}
    wanted = _plain(name)
    parts = [each for each in plain if len(wanted) > 2 and wanted in each]
    found = difflib.get_close_matches(wanted, plain, n=1) or sorted(parts, key=len)
    return plain[found[0]] if found else ""


def _plain(name: str) -> str:
    return name.strip("-").replace("_", "-").lower()


def _describe_unknown(arguments: Sequence[str], options: Sequence[str]) -> str:
    return _describe_options(arguments, options) or f"unexpected argument: {' '.join(arguments)}"


def _describe_options(arguments: Sequence[str], options: Sequence[str]) -> str:
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    return "; ".join(f"there is no option {name}{did_you_mean(name, options)}" for name in names)


def _placeholder(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    if isinstance(action, argparse._SubParsersAction):
        return f"{name} ..."
    return f"[{name}]" if action.nargs == "?" else name
