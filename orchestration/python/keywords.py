"""Keyword arguments that stand for the options of ``splitserve serve``, and the cluster spec made of them.

They go through the parser of the command line: both accept the same values, and refuse others for the same reasons.
"""

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser, did_you_mean
from splitserve.orchestration.cli.options import add_spec_option, cluster_spec, errors_in_options
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

POOLS = ("prefill", "decode", "mixed")
# Positional, arguments of their own, or without a meaning: no command has to find this cluster by its name, and a key
# that isn't on a command line can be in the environment.
_NOT_SETTINGS = frozenset({"help", "model", "spec", "name", "api_key", *POOLS})
_OPTION_WITH_VALUE = re.compile(r"(--[a-z][a-z0-9-]*) (?=[A-Z]+\b)")  # as in: add --decode N


class _Parser(CommandParser):
    """Parser that raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(re.sub(r"^argument ([^:/]+)[^:]*", r"\1", message))


def spec_of(
    model: str | os.PathLike[str] | None,
    spec: str | os.PathLike[str] | None,
    pools: Mapping[str, int],
    settings: Mapping[str, Any],
) -> ClusterSpec:
    """Return the checked spec of a cluster that can start here; a model of the Hub is downloaded first.

    Without any worker it has a mixed one, and without a port a free one, unless a file describes it. Raises
    :class:`TypeError` for an unknown setting, :class:`ConfigError` and :class:`CheckpointError` for wrong values.
    """
    from splitserve.orchestration.spec.hub import with_local_model
    from splitserve.orchestration.spec.start_checks import check_start

    if (model is None) == (spec is None):
        raise TypeError("either a model (a directory or a model id of the Hub) or spec=FILE, a cluster spec, is needed")
    known = dict(keyword_actions())
    for name in settings:
        if name not in known:
            raise TypeError(f"there is no setting {name!r}{did_you_mean(name, known)}")
    wanted = dict(settings)
    if spec is None:
        wanted.setdefault("port", 0)
    arguments = [f"--{name}={count}" for name, count in pools.items() if count]
    for name, value in wanted.items():
        arguments += _arguments(known[name], name, value)
    source = [os.fspath(model)] if model is not None else [f"--spec={os.fspath(spec or '')}"]
    with _errors_in_keywords(known):
        options = _parser().parse_args([*source, *arguments])
        found = with_local_model(cluster_spec(options))
        with errors_in_options(options):
            check_start(found)
    return found


def keyword_actions() -> Iterator[tuple[str, argparse.Action]]:
    """Yield each setting's keyword and its option."""
    for action in _parser()._actions:
        name = _flag_of(action).removeprefix("--").replace("-", "_") or action.dest
        if name not in _NOT_SETTINGS:
            yield name, action


@cache
def _parser() -> _Parser:
    parser = _Parser(prog="splitserve")
    add_spec_option(parser)
    return parser


def _flag_of(action: argparse.Action) -> str:
    return next((flag for flag in action.option_strings if flag.startswith("--")), "")


def _arguments(action: argparse.Action, name: str, value: Any) -> list[str]:
    """Return the arguments of the command line for a keyword argument; None is the default."""
    flag = _flag_of(action)
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
        negated = [each for each in action.option_strings if each.startswith("--no-")]
        return [flag] if value else negated
    if isinstance(action.default, list):
        values = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        if action.nargs is not None:
            return [flag, *map(str, values)]
        return [f"{flag}={each}" for each in values]
    return [f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}"]


@contextmanager
def _errors_in_keywords(known: Mapping[str, argparse.Action]) -> Iterator[None]:
    """Convert errors that name options to errors that name keyword arguments."""

    def keyword(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        if name in known or name in (*POOLS, "spec"):
            return name
        positive = name.removeprefix("no_")
        return f"{positive}=False" if positive in known else found[0]

    try:
        yield
    except (ConfigError, CheckpointError) as error:
        text = re.sub(r"^MODEL\b", "model", _OPTION_WITH_VALUE.sub(r"\1=", str(error)), flags=re.MULTILINE)
        raise type(error)(re.sub(r"--([a-z][a-z0-9-]*)", keyword, text)) from None
