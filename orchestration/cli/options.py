"""Options of the commands, and the cluster spec made of them. Defaults are those of :mod:`splitserve.protocol.config`;
names follow vLLM.
"""

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.common.logs import LOG_LEVELS
from splitserve.orchestration.cli.option_types import COUNT, PORT, address, bytes_option, finite_number, whole_number
from splitserve.orchestration.spec.cluster_spec import (
    ClusterSpec,
    DevicesSpec,
    NetworkSpec,
    RouterSpec,
    SecretRef,
    SecretsSpec,
    SpecError,
)
from splitserve.orchestration.spec.conversion import convert_spec
from splitserve.orchestration.spec.expansion import API_KEY_VARIABLE, SECRET_VARIABLE
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DISK_KV_BACKENDS,
    DTYPES,
    KEEP_POLICIES,
    KV_CACHE_DTYPES,
    EngineConfig,
    RouterConfig,
    SettingsError,
)
from splitserve.protocol.placement_policies import PLACEMENT_POLICIES

_ENGINE_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(EngineConfig) if field.name != "model"
}
_ROUTER_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}

_FLAGS = {
    "model.path": "PATH",
    "memory.kv": "--kv-memory",
    "memory.host": "--host-kv-memory",
    "memory.disk": "--disk-kv-size",
    "memory.gpu_utilization": "--gpu-memory-utilization",
    "router.host": "--host",
    "router.port": "--port",
    "network.host": "--worker-host",
    "network.interface": "--interface",
    "secrets.shared.file": "--secret-file",
    "secrets.api_key.file": "--api-key-file",
    "connector.verify_kv": "--verify-kv",
    "lmcache.endpoint": "--lmcache",
    "pools": "--prefill, --decode, --mixed",
    "name": "--name",
}
"""Options by their places in a spec, where field names don't tell."""
_SPEC_GROUPS = ("workers", "endpoint", "engine", "KV memory", "KV beyond a worker's own memory")


def add_worker_options(parser: argparse.ArgumentParser, num_prefill: int = 0, num_decode: int = 0) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument("--prefill", type=COUNT, default=num_prefill, metavar="P", help="number of prefill workers")
    group.add_argument("--decode", type=COUNT, default=num_decode, metavar="D", help="number of decode workers")
    group.add_argument("--mixed", type=COUNT, default=0, metavar="N", help="number of workers that do both phases")
    for pool in ("prefill", "decode"):
        group.add_argument(
            f"--{pool}-tp",
            type=whole_number(0, 64),
            default=0,
            metavar="N",
            help=f"--tensor-parallel-size of the {pool} workers; 0: as for all",
        )
    group.add_argument(
        "--threads", type=int, default=0, metavar="T", help="per worker; 0 splits the cores between the workers"
    )
    group.add_argument(
        "--worker-host",
        default="",
        metavar="ADDRESS",
        help="address that workers and membership bind; empty: 127.0.0.1, or the node's own address on Ray",
    )
    group.add_argument(
        "--interface", default="", metavar="NAME", help="bind the address of this network interface instead"
    )
    group.add_argument("--ipv6", action="store_true", help="the interface's IPv6 address rather than the IPv4 one")
    group.add_argument("--share-gpus", action="store_true", help="let several workers have the same GPU")
    group.add_argument(
        "--secret-file",
        default="",
        metavar="PATH",
        help="file with the secret that protects what the processes tell each other, needed off loopback; "
        f"empty: ${SECRET_VARIABLE}, else none",
    )


def add_router_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("endpoint")
    group.add_argument("--host", type=address, default=_ROUTER_DEFAULTS["host"], help="address to bind")
    group.add_argument("--port", type=PORT, default=_ROUTER_DEFAULTS["port"], help="port to bind; 0 takes a free one")
    group.add_argument("--served-model-name", default="", metavar="ID", help="model id; empty: the directory's name")
    group.add_argument(
        "--api-key-file",
        default="",
        metavar="PATH",
        help="file with the key that /v1 and /admin want as 'Authorization: Bearer KEY'; "
        f"empty: ${API_KEY_VARIABLE}, else none",
    )
    group.add_argument(
        "--max-body-mib",
        type=int,
        default=_ROUTER_DEFAULTS["max_body_mib"],
        metavar="MIB",
        help="largest body of a request; parsing one MiB can hold all streams for 10 ms",
    )
    policies = "; ".join(f"{name}: {policy.help}" for name, policy in PLACEMENT_POLICIES.items())
    group.add_argument(
        "--policy",
        choices=list(PLACEMENT_POLICIES),
        default=_ROUTER_DEFAULTS["policy"],
        help=f"how requests are placed; {policies}",
    )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but for those that say nothing (none, empty, off); amounts of memory as people write them."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == "":
            return action.help
        if action.type is bytes_option and action.default:
            default = action.default if isinstance(action.default, str) else format_bytes(action.default)
            return f"{action.help} (default: {default})"
        return super()._get_help_string(action)


class _EngineGroup:
    """A group of options that are fields of :class:`EngineConfig`, with its defaults."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, *flags: str, field: str, **settings: Any) -> None:
        self._group.add_argument(*flags, dest=field, default=_ENGINE_DEFAULTS[field], **settings)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    engine = _EngineGroup(parser, "engine")
    _add_model_options(engine)
    _add_step_options(engine)
    _add_kv_options(_EngineGroup(parser, "KV memory"))
    _add_tier_options(_EngineGroup(parser, "KV beyond a worker's own memory"))


def _add_model_options(group: _EngineGroup) -> None:
    group.add("--dtype", field="dtype", choices=DTYPES, help="of weights and KV; auto: the checkpoint's")
    group.add("--device", field="device", choices=DEVICES, help="auto: CUDA where there is one")
    group.add(
        "--load-format", field="load_format", choices=("auto", "dummy"), help="dummy: random weights, for measuring"
    )
    group.add("--seed", field="seed", type=int, help="of dummy weights")
    group.add("--max-model-len", field="max_model_len", type=int, metavar="TOKENS", help="context; 0: the model's own")
    group.add(
        "--tensor-parallel-size",
        "-tp",
        field="tensor_parallel_size",
        type=int,
        metavar="N",
        help="processes that share each worker's model, a GPU each where there are GPUs",
    )
    group.add(
        "--attention-backend", field="attention_backend", choices=ATTENTION_BACKENDS, help="auto: the best that can run"
    )
    group.add("--enforce-eager", field="enforce_eager", action="store_true", help="no CUDA graphs")
    group.add(
        "--capture-mixed-steps",
        field="capture_mixed_steps",
        action=argparse.BooleanOptionalAction,
        help="CUDA graphs of steps with a small prefill, too, beside decode or alone",
    )
    group.add(
        "--late-launch",
        field="late_launch",
        action=argparse.BooleanOptionalAction,
        help="give a GPU its next decode step just in time, so that who arrives meanwhile is in it",
    )
    group.add(
        "--keep-cores-awake",
        field="keep_cores_awake",
        action="store_true",
        help="have workers on GPUs stay on half of the cores, which don't sleep while there are requests: sooner "
        "tokens, for machines that do nothing else",
    )


def _add_step_options(group: _EngineGroup) -> None:
    group.add(
        "--max-batched-tokens",
        "--max-num-batched-tokens",
        field="max_num_batched_tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of one step; 0: 8192 on a GPU, 512 on CPU",
    )
    group.add(
        "--max-prefill-tokens-beside-decode",
        field="max_num_prefill_tokens_beside_decode",
        type=int,
        metavar="TOKENS",
        help="of prompts, in a step that also decodes; smaller: shorter ITL, later first tokens; 0: 320 on a GPU, "
        "as many as fit the step on CPU",
    )
    group.add(
        "--max-num-seqs", field="max_num_seqs", type=int, metavar="N", help="sequences running at once in a worker"
    )
    group.add(
        "--profile-dir",
        field="profile_dir",
        metavar="DIR",
        help="let POST /admin/profile have workers record steps, into this directory of their machine; empty: refused",
    )


def _add_kv_options(group: _EngineGroup) -> None:
    group.add(
        "--block-size",
        field="block_size",
        type=int,
        metavar="TOKENS",
        help="tokens per KV block; 0: 64 on a GPU, 16 on CPU",
    )
    group.add(
        "--kv-cache-dtype", field="kv_cache_dtype", choices=KV_CACHE_DTYPES, help="of KV memory; auto: as --dtype"
    )
    group.add(
        "--kv-memory",
        "--kv-cache-memory-bytes",
        field="kv_memory_bytes",
        type=bytes_option,
        metavar="SIZE",
        help="KV memory of each worker, like 512MiB, 2GB or 1.5g; 0: decide at start",
    )
    group.add(
        "--gpu-memory-utilization",
        field="gpu_memory_utilization",
        type=finite_number,
        metavar="SHARE",
        help="of a GPU's memory that a worker takes in all, unless --kv-memory is given",
    )
    group.add(
        "--enable-prefix-caching",
        field="enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
        help="find KV of earlier prompts that begin alike",
    )
    group.add(
        "--verify-kv",
        field="verify_kv",
        action="store_true",
        help="digest blocks on both sides of a hand-over; a difference is logged, counted, and never used",
    )
    group.add(
        "--read-threads",
        field="read_threads",
        type=int,
        metavar="N",
        help="that read KV from a peer at once where it is posted to a transport; 0: as many as fill the link",
    )
    group.add(
        "--map-peer-memory",
        field="map_peer_memory",
        action=argparse.BooleanOptionalAction,
        help="let a GPU copy from a peer's memory through a mapping of it, where that is faster",
    )
    group.add("--kv-events", field="kv_events", action="store_true", help="workers publish what KV they hold")


def _add_tier_options(group: _EngineGroup) -> None:
    group.add(
        "--host-kv-memory",
        field="host_kv_memory_bytes",
        type=bytes_option,
        metavar="SIZE",
        help="host memory of each worker for KV beyond --kv-memory, pinned on a GPU worker; 0: none",
    )
    group.add(
        "--disk-kv-dir",
        field="disk_kv_dir",
        metavar="DIR",
        help="directory for KV beyond host memory, which a worker finds again after a restart; empty: none",
    )
    group.add(
        "--disk-kv-size",
        field="disk_kv_bytes",
        type=bytes_option,
        metavar="SIZE",
        help="of each worker's KV in --disk-kv-dir, at most",
    )
    group.add(
        "--disk-kv-backend",
        field="disk_kv_backend",
        choices=DISK_KV_BACKENDS,
        help="what moves KV to --disk-kv-dir: NIXL's POSIX backend, or GPUDirect Storage where it's installed",
    )
    group.add(
        "--lmcache",
        field="lmcache_endpoint",
        metavar="ENDPOINT",
        help="of an LMCache server on this machine, like tcp://127.0.0.1:5555 (`splitserve lmcache`); empty: none",
    )
    group.add("--kv-keep", field="kv_keep", choices=KEEP_POLICIES, help="what is worth a place beyond the device")
    group.add(
        "--kv-load-seconds",
        field="kv_load_seconds",
        type=finite_number,
        metavar="S",
        help="how long a request waits for its KV to come up again before it computes it",
    )


def add_spec_option(parser: argparse.ArgumentParser) -> None:
    """``MODEL`` and its options, or ``--spec FILE`` instead of all of them."""
    parser.add_argument("model", nargs="?", metavar="PATH", help="directory with config.json, *.safetensors, ...")
    parser.add_argument(
        "--spec", default="", metavar="FILE", help="cluster spec (YAML) that says what the options below say otherwise"
    )
    parser.add_argument("--name", default="", help="of the cluster; empty: the spec's, which is 'default' by default")
    add_worker_options(parser)
    add_router_options(parser)
    add_engine_options(parser)
    parser.set_defaults(spec_parser=parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How a cluster is run, whatever it consists of."""
    parser.add_argument("--restart", action=argparse.BooleanOptionalAction, default=True, help="start what ends again")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="of every process")


def cluster_spec(options: argparse.Namespace) -> ClusterSpec:
    """The cluster that the options describe, or the file that they name. Raises :class:`ConfigError`."""
    if options.spec:
        from splitserve.orchestration.spec.document import read_spec

        _refuse_other_options(options)
        return _called(options.name, read_spec(options.spec))
    if not options.model:
        raise ConfigError("what is to be served? Give the path of a checkpoint, or --spec FILE")
    with errors_in_options(options):
        return _called(options.name, _spec_of_options(options))


def _spec_of_options(options: argparse.Namespace) -> ClusterSpec:
    engine = {name: getattr(options, name) for name in _ENGINE_DEFAULTS if hasattr(options, name)}
    return simple_spec(
        EngineConfig(model=options.model, **engine),
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_mixed=options.mixed,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        router=RouterSpec(
            host=options.host, port=options.port, policy=options.policy, max_body_mib=options.max_body_mib
        ),
        network=NetworkSpec(host=options.worker_host, interface=options.interface, ip_version=6 if options.ipv6 else 4),
        secrets=SecretsSpec(shared=_file(options.secret_file), api_key=_file(options.api_key_file)),
        devices=DevicesSpec(share=options.share_gpus),
    )


@contextmanager
def errors_in_options(options: argparse.Namespace) -> Iterator[None]:
    """Errors about places in a spec name the options that they come from, or the file."""
    try:
        yield
    except SettingsError as error:
        raise _named((flag_of(field, options), text) for field, text in error.problems) from None
    except SpecError as error:
        if options.spec:
            raise ConfigError("\n".join(f"{options.spec}: {place}: {text}" for place, text in error.problems)) from None
        raise _named((flag_of(place, options), text) for place, text in error.problems) from None


def _named(problems: Iterable[tuple[str, str]]) -> ConfigError:
    return ConfigError("\n".join(dict.fromkeys(f"{name}: {text}" for name, text in problems)))


def flag_of(place: str, options: argparse.Namespace) -> str:
    """The option that sets what is at ``place`` of a spec, or a field of :class:`EngineConfig`; else ``place``."""
    name = re.sub(r"^pools\[\d+\]\.", "", place)
    if name in _FLAGS:
        return _FLAGS[name]
    parser: argparse.ArgumentParser = options.spec_parser
    for action in parser._actions:
        if action.dest == name.removeprefix("engine.").removeprefix("model.") and action.option_strings:
            return action.option_strings[0]
    return place


def _called(name: str, spec: ClusterSpec) -> ClusterSpec:
    return convert_spec({**msgspec.to_builtins(spec), "name": name}) if name else spec


def _file(path: str) -> SecretRef | None:
    return SecretRef(file=os.path.abspath(path)) if path else None


def _refuse_other_options(options: argparse.Namespace) -> None:
    """An option that the file would silently overrule is a mistake."""
    parser: argparse.ArgumentParser = options.spec_parser
    for group in parser._action_groups:
        for action in group._group_actions:
            given = getattr(options, action.dest, action.default) != action.default
            if given and (group.title in _SPEC_GROUPS or action.dest == "model"):
                flag = action.option_strings[0] if action.option_strings else "PATH"
                raise ConfigError(f"{flag} doesn't go with --spec: put it into {options.spec}, or leave --spec away")
