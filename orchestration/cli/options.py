"""Options of the commands, and the cluster spec made from them. Options of settings are derived from the settings'
declarations (:mod:`splitserve.orchestration.spec.settings`); names follow vLLM.
"""

import argparse
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.common.logs import LOG_FORMATS, LOG_LEVELS
from splitserve.orchestration.cli.option_types import (
    COUNT,
    absolute_path,
    address,
    bytes_option,
    finite_number,
    name_or_path,
    size_option,
    source,
    whole_number,
)
from splitserve.orchestration.spec.cluster_spec import API_KEY_VARIABLE, ClusterSpec, SpecError
from splitserve.orchestration.spec.conversion import convert_spec
from splitserve.orchestration.spec.settings import SpecSetting, spec_settings
from splitserve.orchestration.spec.shorthand import put, simple_spec
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.engine_config import (
    ENGINE,
    KV_MEMORY,
    KV_TIERS,
    OPTION_GROUPS,
    WORKERS,
    EngineConfig,
)
from splitserve.protocol.placement.policies import DEFAULT_POLICY
from splitserve.protocol.request import Role
from splitserve.protocol.settings import SettingsError

_log = logging.getLogger(__name__)

_SETTINGS = [each for each in spec_settings() if each.setting.flags and each.setting.command == "serve"]
_FLAGS = {
    "model.path": "MODEL",
    "pools": "--prefill, --decode, --mixed",
    "name": "--name",
    **{each.location: each.setting.flags[0] for each in _SETTINGS},
    **{each.field: each.setting.flags[0] for each in _SETTINGS if each.field},
}
"""Options by location in a spec, and by field of an :class:`EngineConfig`."""


def _add_settings(parser: argparse.ArgumentParser, titles: Sequence[str]) -> None:
    """Add an option for each setting that has one, in the groups of these titles."""
    groups = {group.title: group for group in parser._action_groups}
    for title in titles:
        group = groups.get(title) or parser.add_argument_group(title)
        for each in _SETTINGS:
            if each.setting.group == title:
                _add_setting(group, each)


def _add_setting(group: argparse._ActionsContainer, each: SpecSetting) -> None:
    setting = each.setting
    details: dict[str, Any] = {"default": each.default, "help": setting.help or _as_help(each.description)}
    metavar = setting.metavar or None
    if each.field:
        details["dest"] = each.field
    if setting.const is not None:
        details |= {"action": "store_const", "const": setting.const}
    elif isinstance(each.default, bool):
        details["action"] = argparse.BooleanOptionalAction if each.default else "store_true"
    elif setting.further or isinstance(each.default, list):
        details |= {"action": "extend", "nargs": "+", "metavar": metavar, "default": []}
    elif setting.choices:
        details["choices"] = setting.choices
    else:
        details |= {"type": _parser_of(each), "metavar": metavar}
    group.add_argument(*setting.flags, **details)


def _parser_of(each: SpecSetting) -> Callable[[str], Any]:
    """Return the parser of an option's argument. The engine's config checks the ranges of its settings."""
    if each.setting.form == "size":
        return bytes_option if each.field else size_option(each.meta)
    if each.setting.form:
        parsers = {"address": address, "path": absolute_path, "source": source, "name or path": name_or_path}
        return parsers[each.setting.form]
    if isinstance(each.default, float):
        return finite_number
    if isinstance(each.default, int) and not each.field:
        assert isinstance(each.meta.ge, int) and isinstance(each.meta.le, int), each.location
        return whole_number(each.meta.ge, each.meta.le)
    return type(each.default)


def _as_help(description: str) -> str:
    """Return a description in the style of argparse's own help texts: in lower case, without a full stop."""
    is_word = description[1:2].islower() or description[1:2] == " "
    return (description[:1].lower() if is_word else description[:1]) + description[1:].removesuffix(".")


def add_options_of(command: str, parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that has settings of its own."""
    for each in spec_settings():
        if each.setting.flags and each.setting.command == command:
            _add_setting(parser, each)


def _add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Add the shorthand for pools that are named after their roles."""
    group = parser.add_argument_group(WORKERS)
    group.add_argument("--prefill", type=COUNT, default=0, metavar="P", help="number of prefill workers")
    group.add_argument("--decode", type=COUNT, default=0, metavar="D", help="number of decode workers")
    group.add_argument(
        "--mixed",
        type=COUNT,
        default=0,
        metavar="N",
        help="number of workers that do both phases; 1 if no workers are given",
    )
    for pool in (Role.PREFILL, Role.DECODE):
        group.add_argument(
            f"--{pool}-tp",
            type=whole_number(0, 64),
            default=0,
            metavar="N",
            help=f"--tensor-parallel-size of the {pool} workers; 0: as for all",
        )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with defaults, except trivial ones (none, empty, off); amounts of memory have units."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", []) or action.const is not None:
            return action.help
        if action.metavar == "SIZE" and action.default:
            default = action.default if isinstance(action.default, str) else format_bytes(action.default)
            return f"{action.help} (default: {default})"
        return super()._get_help_string(action)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, (ENGINE, KV_MEMORY, KV_TIERS))


def add_spec_option(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL`` and its options, or ``--spec FILE`` instead of all of them."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory with config.json, *.safetensors, ...; or a model id of the Hugging Face Hub, like "
        "Qwen/Qwen3-0.6B",
    )
    parser.add_argument("--spec", default="", metavar="FILE", help="cluster spec (YAML), instead of the options below")
    parser.add_argument("--name", default="", help="of the cluster; empty: the spec's, which is 'default' by default")
    _add_pool_options(parser)
    _add_settings(parser, OPTION_GROUPS)
    parser.add_argument(
        "--api-key",
        default="",
        metavar="KEY",
        help="the key itself, which every user of this machine sees in the list of processes; better: --api-key-file",
    )
    parser.set_defaults(spec_parser=parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add options for running a cluster, which are independent of its spec."""
    parser.add_argument("--restart", action=argparse.BooleanOptionalAction, default=True, help="start what ends again")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="of every process")
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="of every process on this machine: lines of text, or JSON objects",
    )


def cluster_spec(options: argparse.Namespace) -> ClusterSpec:
    """Return the spec that the options describe, or the one in the file that they name. Raises :class:`ConfigError`.

    A key given as an option is in this process's environment afterwards, where the processes of a cluster here find it.
    """
    spec = _given_spec(options)
    if options.api_key:
        if spec.secrets.api_key is not None:
            raise ConfigError("--api-key: there is a reference to a key already (--api-key-file, or secrets.api_key)")
        _log.warning(
            "every user of this machine can see the --api-key in the list of processes: prefer --api-key-file, or "
            "%s in the environment",
            API_KEY_VARIABLE,
        )
        os.environ[API_KEY_VARIABLE] = options.api_key
    return spec


def _given_spec(options: argparse.Namespace) -> ClusterSpec:
    if options.spec:
        from splitserve.orchestration.spec.document import read_spec

        _refuse_other_options(options)
        return _called(options.name, read_spec(options.spec))
    if not options.model:
        after = "; it goes before options that take several values" if options.served_model_name else ""
        raise ConfigError(f"what is to be served? Give the path of a checkpoint, or --spec FILE{after}")
    with errors_in_options(options):
        return _called(options.name, _spec_of_options(options))


def _spec_of_options(options: argparse.Namespace) -> ClusterSpec:
    parts: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for each in _SETTINGS:
        value = getattr(options, each.field or each.setting.flags[0].removeprefix("--").replace("-", "_"))
        if each.setting.further:
            value, further = (value[0], value[1:]) if value else ("", [])
            if further:
                put(parts, each.setting.further, further)
        if each.field:
            engine[each.field] = value
        elif value != each.default:
            put(parts, each.location, value)
    return simple_spec(
        EngineConfig(model=options.model, **engine),
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_mixed=options.mixed,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        policy=DEFAULT_POLICY,
        **parts,
    )


@contextmanager
def errors_in_options(options: argparse.Namespace) -> Iterator[None]:
    """Convert errors at locations in a spec to errors that name the options, or the file, that set them."""
    try:
        yield
    except SettingsError as error:
        raise _named((flag_of(field), text) for field, text in error.problems) from None
    except SpecError as error:
        if options.spec:
            raise ConfigError(
                "\n".join(f"{options.spec}: {location}: {text}" for location, text in error.problems)
            ) from None
        raise _named((flag_of(location), text) for location, text in error.problems) from None


def _named(problems: Iterable[tuple[str, str]]) -> ConfigError:
    return ConfigError("\n".join(dict.fromkeys(f"{name}: {text}" for name, text in problems)))


def flag_of(location: str) -> str:
    """Return the option for ``location`` in a spec or for a field of an engine's config; else the location."""
    anywhere = re.sub(r"\[\d+\]", "[]", location).removesuffix("[]")
    return _FLAGS.get(anywhere) or _FLAGS.get(anywhere.removeprefix("pools[].")) or location


def _called(name: str, spec: ClusterSpec) -> ClusterSpec:
    return convert_spec({**msgspec.to_builtins(spec), "name": name}) if name else spec


def _refuse_other_options(options: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` for options that the spec's file would silently override."""
    parser: argparse.ArgumentParser = options.spec_parser
    for group in parser._action_groups:
        for action in group._group_actions:
            given = getattr(options, action.dest, action.default) != action.default
            if given and (group.title in OPTION_GROUPS or action.dest == "model"):
                flag = action.option_strings[0] if action.option_strings else "MODEL"
                raise ConfigError(f"{flag} doesn't go with --spec: put it into {options.spec}, or leave --spec away")
