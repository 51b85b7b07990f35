"""``splitserve bench handover``: KV read from another process by the production connector, against a plain copy.

Every rank of both workers is a process with KV memory of its own, on a GPU of its own as far as there are enough; with
``--one-rank`` one rank of decode reads alone, with no other rank on its GPU. The reader measures from a read's command
to its verified result, generations included. The baseline copies as many bytes in one piece between the same GPUs, by
all ranks at once, or block by block in host memory; beside it, the copy of one rank while the others are idle. They
alternate.

``--served`` measures whole hand-overs in a running 1P1D cluster instead: see :mod:`.handover_served`.
"""

import argparse
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.benchmarks.common.arguments import finite, not_negative, positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import few_values_notes
from splitserve.benchmarks.engine.engine_options import add_switches
from splitserve.benchmarks.kv import handover_served
from splitserve.benchmarks.kv.handover_ranks import STAGES, RankSetup, Sinks, Timing, two_workers
from splitserve.common.cores import awake_cpus, usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.kvconnector.transfer.read_settings import MIB, ReadSettings
from splitserve.models.demo.published import NAMES, PUBLISHED, named_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import bytes_option, positive_bytes
from splitserve.orchestration.hosts.affinity import bind_process
from splitserve.protocol.engine_config import ATTENTION_BACKENDS
from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind
from splitserve.worker.machine.awake_cores import kept_awake

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"shape": "qwen3-0.6b", "dtype": "float32", "prompt_tokens": [128, 512, 2000], "block_size": [16, 32]},
    "cuda": {"shape": "llama-3.1-8b", "dtype": "bfloat16", "prompt_tokens": [1024, 4096, 8192], "block_size": [64]},
}
NOT_SERVED = ("threads", "split_size", "path", "copy_streams", "poll_us", "serve_poll_us", "naive")
ONLY_SERVED = (
    *("against_mixed", "attention_backend", "model", "ray", "chunk_tokens", "kv_memory"),
    *("late_launch", "second_token_at_prefill"),
)
NAIVE_PIECE_BYTES = 32 << 10  # pieces of a layout per layer for Llama-3.1-8B with 16 tokens per block


@dataclass(frozen=True, slots=True)
class Arm:
    """One measurement: local and remote blocks, in order."""

    num_tokens: int
    pool: str
    local: Sequence[int]
    remote: Sequence[int]


def layout_of(shape: str, dtype: str, block_size: int, num_ranks: int = 1) -> LayoutRecord:
    sizes = named_config(shape)
    heads = sizes.num_layers, sizes.num_kv_heads, sizes.head_dim
    return LayoutRecord(shape, "random", dtype, block_size, *heads, tensor_parallel_size=num_ranks)


def arms(token_counts: Sequence[int], block_size: int, num_blocks: int, seed: int) -> list[Arm]:
    """Make fresh pools (adjacent blocks on both sides) and shuffled ones (hardly two adjacent blocks belong
    together)."""
    chosen = random.Random(seed)
    made: list[Arm] = []
    for num_tokens in token_counts:
        count = num_blocks_for(num_tokens, block_size)
        made.append(Arm(num_tokens, "fresh", range(count), range(count)))
        local, remote = (chosen.sample(range(num_blocks), count) for _ in range(2))
        made.append(Arm(num_tokens, "shuffled", local, remote))
    return made


def measure(arm: Arm, sinks: Sinks, layout: LayoutRecord, repeats: int) -> dict[str, Any]:
    """Alternate reads by all ranks, copies by all, and copies by the first alone; the slowest rank counts. Several
    ranks that read from one GPU share its link, in reads as in copies."""
    sinks.call("read", arm.local, arm.remote)
    sinks.call("check", arm.local, arm.remote)
    reads, copies, alone, path = [], [], [], ""
    by_rank: list[list[Timing]] = []
    for _ in range(repeats):
        timings: list[Timing] = sinks.call("read", arm.local, arm.remote)
        reads.append(max(timing.seconds for timing in timings))
        by_rank.append(timings)
        copies.append(max(map(float, sinks.call("copy", arm.local, arm.remote))))
        alone.append(float(sinks.first("copy", arm.local, arm.remote)))
        path = "+".join(sorted({timing.path for timing in timings}))
    num_bytes = len(arm.local) * layout.block_bytes
    return {
        "prompt_tokens": arm.num_tokens,
        "block_size": layout.block_size,
        "pool": arm.pool,
        "bytes_per_rank": num_bytes,
        "path": path,
        **read_figures(num_bytes, reads, copies, alone),
        "stages_us": stages_us([max(timings, key=lambda timing: timing.seconds) for timings in by_rank]),
        "stages_us_of_ranks": [stages_us(timings) for timings in zip(*by_rank, strict=True)],
    }


def stages_us(timings: Sequence[Timing]) -> dict[str, float]:
    """Return the medians of reads' stages in microseconds, by the names of :data:`STAGES`."""
    return {name: statistics.median(timing.stages[name] for timing in timings) * 1e6 for name in STAGES}


def read_figures(
    num_bytes: int, reads: Sequence[float], copies: Sequence[float], alone: Sequence[float]
) -> dict[str, float]:
    """Reduce the seconds of reads, of copies by all ranks and of copies by one alone, all in turn, to medians."""
    read_seconds, copy_seconds = statistics.median(reads), statistics.median(copies)
    return {
        "handover_ms": read_seconds * 1e3,
        "handover_p99_ms": sorted(reads)[max(0, -(-99 * len(reads) // 100) - 1)] * 1e3,
        "handover_gb_per_second": num_bytes / read_seconds / 1e9,
        "copy_gb_per_second": num_bytes / copy_seconds / 1e9,
        "share_of_copy": statistics.median(copy / read for read, copy in zip(reads, copies, strict=True)),
        "lone_copy_gb_per_second": num_bytes / statistics.median(alone) / 1e9,
        "share_of_lone_copy": statistics.median(copy / read for read, copy in zip(reads, alone, strict=True)),
    }


def measure_naive(sinks: Sinks, layout: LayoutRecord, num_tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """Measure the same prompt read by one agent in the pieces of a layout per layer."""
    num_bytes = num_blocks_for(num_tokens, layout.block_size) * layout.block_bytes
    seconds = [sinks.first("pieces", num_bytes, NAIVE_PIECE_BYTES, seed + repeat) for repeat in range(repeats)]
    copies = [sinks.first("copy", *[range(num_bytes // layout.block_bytes)] * 2) for _ in range(repeats)]
    return {
        "prompt_tokens": num_tokens,
        "block_size": layout.block_size,
        "pool": "pieces of 32 KiB",
        "bytes_per_rank": num_bytes,
        "path": "naive",
        "threads": 1,
        "handover_ms": statistics.median(seconds) * 1e3,
        "handover_p99_ms": max(seconds) * 1e3,
        "handover_gb_per_second": num_bytes / statistics.median(seconds) / 1e9,
        "copy_gb_per_second": num_bytes / statistics.median(copies) / 1e9,
        "share_of_copy": statistics.median(copies) / statistics.median(seconds),
    }


def devices(
    device: str, sources: LayoutRecord, sinks: LayoutRecord, *, one_rank: bool = False
) -> tuple[list[str], list[str]]:
    """Choose the devices of the ranks of both sides: different GPUs, as long as there are any left; then GPUs from
    which the rank doesn't read, if there are any. With ``one_rank`` all ranks of prefill on one GPU, and one of decode
    on another."""
    num_sources, num_sinks = sources.tensor_parallel_size, 1 if one_rank else sinks.tensor_parallel_size
    if device == "cpu":
        return ["cpu"] * num_sources, ["cpu"] * num_sinks
    if one_rank:
        return ["cuda:0"] * num_sources, ["cuda:1"]
    gpus = range(torch.cuda.device_count())
    of_sources = [rank % len(gpus) for rank in range(num_sources)]
    taken = Counter(of_sources)
    of_sinks = []
    for rank in range(num_sinks):
        read = {of_sources[span.rank] for span in sinks.block_layout.spans(rank, sources.block_layout)}
        gpu = min(gpus, key=lambda gpu: (gpu in read, taken[gpu], gpu))
        of_sinks.append(gpu)
        taken[gpu] += 1
    return [f"cuda:{gpu}" for gpu in of_sources], [f"cuda:{gpu}" for gpu in of_sinks]


def parse_pair(text: str) -> tuple[int, int]:
    """Parse ``2:1``: ranks of prefill and of decode."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit()) or 0 in (int(prefill), int(decode)):
        raise argparse.ArgumentTypeError(f"{text!r} isn't P:D, the ranks of prefill and of decode, like 2:1")
    return int(prefill), int(decode)


def run(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """Measure every block size and pair of ranks in processes of their own."""
    for block_size, (num_sources, num_sinks) in itertools.product(options.block_size, options.tp):
        largest = num_blocks_for(max(options.prompt_tokens), block_size)
        num_blocks = largest + max(2, largest // 2)
        layouts = [layout_of(options.shape, options.dtype, block_size, ranks) for ranks in (num_sources, num_sinks)]
        placed = [
            [RankSetup(layout, rank, num_blocks, name) for rank, name in enumerate(names)]
            for layout, names in zip(layouts, devices(device, *layouts, one_rank=options.one_rank), strict=True)
        ]
        with two_workers(placed[0], placed[1], options.serve_poll_us / 1e6) as sinks:
            common = {"prefill_tp": num_sources, "decode_tp": num_sinks, "one_rank": options.one_rank}
            common["ranks_per_device"] = max(Counter(each.device for side in placed for each in side).values())
            for threads, split_bytes, path, streams in itertools.product(
                options.threads, options.split_size, options.path, options.copy_streams
            ):
                changes = {
                    "num_threads": threads,
                    "split_bytes": split_bytes,
                    "poll_seconds": options.poll_us / 1e6,
                    "copy_streams": streams,
                }
                kind = MemoryKind.VRAM if device == "cuda" else MemoryKind.DRAM
                wanted = None if path == "auto" else ReadPath(path)
                settings = ReadSettings.of(kind, path=wanted, maps=options.map_peer_memory, **changes)
                link = sinks.call("connect", sinks.welcome, settings)[0]
                for arm in arms(options.prompt_tokens, block_size, num_blocks, options.seed):
                    yield {
                        **common,
                        "split_mib": settings.split_bytes // MIB,
                        "copy_streams": settings.copy_streams,
                        "transport": link.transport,
                        "link_gb_per_second": link.bytes_per_second / 1e9,
                        **(measured := measure(arm, sinks, layouts[1], options.repeats)),
                        "threads": 1 if are_through_mapping(measured["path"]) else settings.num_threads,
                    }
            if options.naive and (num_sources, num_sinks) == (1, 1):
                for num_tokens in options.prompt_tokens:
                    yield common | measure_naive(sinks, layouts[1], num_tokens, 3, options.seed)


def are_through_mapping(paths: str) -> bool:
    """Return whether no rank used a transport; ``paths``: those that ranks took, with ``+`` between them."""
    return all(ReadPath(path).is_through_mapping for path in paths.split("+"))


HEADERS = ["prompt", "block", "tp", "pool", "path", "threads", "MB/rank", "ms", "p99 ms", "GB/s", "copy GB/s", "share"]
HEADERS += ["of one alone", "us: commanded", "woken", "queued", "copied", "verified", "noticed"]


def row_of(result: dict[str, Any]) -> list[object]:
    return [
        result["prompt_tokens"],
        result["block_size"],
        f"{result['prefill_tp']}:{result['decode_tp']}" + " (1)" * result["one_rank"],
        result["pool"],
        result["path"],
        result["threads"],
        f"{result['bytes_per_rank'] / 1e6:.0f}",
        f"{result['handover_ms']:.2f}",
        f"{result['handover_p99_ms']:.2f}",
        f"{result['handover_gb_per_second']:.2f}",
        f"{result['copy_gb_per_second']:.2f}",
        f"{result['share_of_copy']:.0%}",
        f"{result.get('share_of_lone_copy', result['share_of_copy']):.0%}",
        *(f"{result['stages_us'][name]:.0f}" if "stages_us" in result else "-" for name in STAGES),
    ]


def add_served_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--served", action="store_true", help="whole hand-overs in a 1P1D cluster instead; see also the next ones")
    add(
        "--ray",
        default="",
        metavar="ADDRESS",
        help="measure in a cluster on Ray, too: HOST:PORT, auto, or local: start it here",
    )
    add("--against-mixed", action="store_true", help="count answers with the same tokens as a mixed worker's")
    add("--attention-backend", choices=ATTENTION_BACKENDS, default="auto")
    add("--model", default="", help="directory of its config; empty: one of --shape. Weights are random")
    add("--chunk-tokens", type=positive, default=2048, metavar="N", help="chunk size of prompts in chunks")
    add(
        "--kv-memory",
        type=positive_bytes,
        default="4GiB",
        metavar="SIZE",
        help="KV memory of each worker of that cluster",
    )


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench handover", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add(
        "--shape",
        choices=sorted(NAMES),
        help="model whose KV is moved; default on a GPU: llama-3.1-8b, else qwen3-0.6b",
    )
    add("--dtype", choices=["float32", "bfloat16"], help="default: on a GPU bfloat16, else float32")
    add("--prompt-tokens", type=positive, nargs="+", metavar="N")
    add("--block-size", type=positive, nargs="+", metavar="N")
    add("--tp", type=parse_pair, nargs="+", default=[(1, 1)], metavar="P:D", help="ranks of prefill and of decode")
    add(
        "--one-rank",
        action="store_true",
        help="one rank of decode reads alone, all of prefill on one GPU: for pairs on two GPUs",
    )
    add(
        "--threads",
        type=not_negative,
        nargs="+",
        default=[0],
        metavar="N",
        help="numbers of reading threads; 0: as in production",
    )
    add(
        "--split-size",
        type=bytes_option,
        nargs="+",
        default=[0],
        metavar="SIZE",
        help="size above which reads are split; 0: as in production",
    )
    add(
        "--copy-streams",
        type=not_negative,
        nargs="+",
        default=[0],
        metavar="N",
        help="streams of copy engines' reads of heads that both sides split differently; 0: as in production",
    )
    add("--path", nargs="+", choices=["auto", *ReadPath], default=["auto"], help="paths of the data; auto: by cost")
    add("--poll-us", type=finite, default=0.0, help="time between polls of reads in flight; 0: as in production")
    add("--serve-poll-us", type=finite, default=0.0, help="time between polls of the source; 0: as in production")
    add("--naive", action="store_true", help="also read the prompt in shuffled pieces of 32 KiB")
    add_served_options(parser)
    add_switches(parser)
    add("--repeats", type=positive, default=15)
    add("--seed", type=not_negative, default=0)
    add_result_options(parser)
    return parser


def _given(options: argparse.Namespace, names: Sequence[str]) -> str:
    """Return the first option of ``names`` that isn't at its default, as it was given; "" if all are."""
    defaults = parser().parse_args([])
    given = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    if not given:
        return ""
    return f"--{'no-' if getattr(options, given[0]) is False else ''}{given[0].replace('_', '-')}"


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(list(argv))
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but PyTorch finds no CUDA device")
    if options.keep_cores_awake and device == "cpu":
        raise ConfigError("--keep-cores-awake is for GPUs; copies between processes need the cores themselves")
    if options.one_rank and (options.served or (device == "cuda" and torch.cuda.device_count() < 2)):
        raise ConfigError("--one-rank is for two GPUs, and not for --served")
    given = _given(options, NOT_SERVED if options.served else ONLY_SERVED)
    if given and options.served:
        raise ConfigError(f"{given} isn't for --served: workers read as in production")
    if given:
        raise ConfigError(f"{given} is for --served: without it no worker runs")
    if not options.served and options.shape in PUBLISHED:
        raise ConfigError(f"--shape {options.shape} is for --served: its KV isn't heads of one kind in all layers")
    if options.naive and (1, 1) not in options.tp:
        raise ConfigError("--naive is measured for the pair 1:1; add it to --tp")
    for name, default in DEFAULTS[device].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    results = []
    run_all, to_row, headers = (
        (handover_served.run, handover_served.row_of, handover_served.HEADERS)
        if options.served
        else (run, row_of, HEADERS)
    )
    keep_awake = options.keep_cores_awake and not options.served  # workers of --served do it themselves
    if keep_awake and not bind_process(awake_cpus(usable_cpus())):
        raise ConfigError("this process can't stay on half of the cores; go without --keep-cores-awake")
    with kept_awake(keep_awake, usable_cpus()):
        for result in run_all(options, device):
            results.append(result)
            print(" ".join(map(str, to_row(result))), flush=True)  # before anything else can fail
    print(table([to_row(result) for result in results], headers))
    for note in few_values_notes({"each figure": [{"count": options.repeats}]}):
        print(f"note: {note}")
    if options.served and options.ray:
        print(handover_served.summary(results))
    keep_result("handover", argv, {"device": device, "results": results}, options)
    return 0
