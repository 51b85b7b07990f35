"""``splitserve bench soak``: resident memory of every process of a cluster under many requests of random lengths.

A small demo model on CPU, one prefill and one decode worker. A fixed number of requests is in flight all the time;
prompt and output lengths are uniformly random, so steps have all numbers of rows that the settings allow. Memory must
be flat over the second half of the requests: the growth is the slope of a least-squares line through the samples of
that half, times the half's length.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from splitserve.benchmarks.common.arguments import finite, positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.common.errors import ConfigError
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

VOCABULARY_SIZE = 1500
MAX_MODEL_LEN = 1024
MIN_SAMPLES = 8  # samples of the second half; fewer don't determine a slope


@dataclass(slots=True)
class Samples:
    """Resident memory over a run."""

    seconds: list[float] = field(default_factory=list)  # since the load's start
    num_sent: list[int] = field(default_factory=list)  # requests sent by then
    resident_mib: dict[str, list[float]] = field(default_factory=dict)  # by process, a value per sample

    def take(self, pids: Mapping[str, int], seconds: float, num_sent: int) -> None:
        """Add a sample of the processes ``pids``, by name."""
        self.seconds.append(seconds)
        self.num_sent.append(num_sent)
        for name, pid in pids.items():
            resident = psutil.Process(pid).memory_info().rss / 2**20
            self.resident_mib.setdefault(name, []).append(round(resident, 1))

    def growth(self, num_requests: int) -> dict[str, dict[str, float]]:
        """Return first, middle, last and largest value of each process, and its slope over the second half.

        ``mib_per_1000_requests`` is the slope of the least-squares line, ``second_half_mib`` that slope times half of
        ``num_requests``. Raises :class:`ConfigError` for too few samples.
        """
        half = [index for index, sent in enumerate(self.num_sent) if 2 * sent >= num_requests]
        if len(half) < MIN_SAMPLES:
            raise ConfigError(
                f"the second half has {len(half)} samples, at least {MIN_SAMPLES} are needed: "
                "raise --requests or lower --sample-seconds"
            )
        # by time, not by requests: the last ones are all sent while 64 of them still run
        times = np.array(self.seconds)[half]
        span = float(times[-1] - times[0])
        found = {}
        for name, values in self.resident_mib.items():
            slope = float(np.polyfit(times, np.array(values)[half], 1)[0])
            found[name] = {
                "first_mib": values[0],
                "half_mib": values[half[0]],
                "last_mib": values[-1],
                "max_mib": max(values),
                "second_half_mib": round(slope * span, 2),
                "mib_per_1000_requests": round(slope * span / (num_requests / 2000), 3),
            }
        return found


def make_bodies(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Return greedy requests of random prompts and lengths, the same ones for the same seed."""
    chosen = random.Random(options.seed)
    return [
        {
            "model": model,
            "prompt": chosen.choices(range(VOCABULARY_SIZE), k=chosen.randint(1, options.max_input_len)),
            "max_tokens": chosen.randint(1, options.max_output_len),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        for _ in range(options.requests)
    ]


async def load(
    options: argparse.Namespace, url: str, model: str, pids: Mapping[str, int], samples: Samples
) -> list[RequestRecord]:
    """Send all requests, ``--concurrency`` at once, and take samples until the last one is answered."""
    bodies = make_bodies(options, model)
    records = [RequestRecord(due_seconds=0.0) for _ in bodies]
    running = asyncio.create_task(
        run_load(Endpoint(url), bodies, [0.0] * len(bodies), options.concurrency, records=records)
    )
    start = time.monotonic()
    while not running.done():
        num_sent = sum(record.sent_seconds > 0 for record in records)
        samples.take(pids, time.monotonic() - start, num_sent)
        await asyncio.wait([running], timeout=options.sample_seconds)
    return running.result()


def run(options: argparse.Namespace) -> tuple[list[RequestRecord], Samples]:
    """Start the cluster, run the load, end the cluster. Raises :class:`ConfigError` if a process was replaced."""
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="splitserve-soak-") as folder:
        engine = EngineConfig(
            model=str(write_demo_model(folder, shape="tiny")),
            served_model_name="tiny",
            device="cpu",
            dtype="float32",
            threads=1,
            kv_memory_bytes=options.kv_memory_mib << 20,
            max_model_len=MAX_MODEL_LEN,
        )
        spec = simple_spec(engine, num_prefill=1, num_decode=1, port=0)
        with LocalCluster(spec, log_level="warning") as cluster:
            pids = cluster.pids
            records = asyncio.run(load(options, cluster.url, spec.served_model_name, pids, samples))
            if cluster.pids != pids:
                raise ConfigError(f"processes were replaced during the run: {pids}, then {cluster.pids}")
    return records, samples


def main(argv: Sequence[str]) -> int:
    """Run the soak that ``argv`` describes; exit status 1 if a request failed or memory grew beyond the bound."""
    options = _parse(argv)
    records, samples = run(options)
    growth = samples.growth(options.requests)
    failures = [record.error for record in records if record.error]
    columns = ("first_mib", "half_mib", "last_mib", "max_mib", "second_half_mib", "mib_per_1000_requests")
    headers = ("resident memory, MiB", "first", "half-way", "last", "max", "growth, 2nd half", "per 1,000 requests")
    print(table([[name, *(figures[column] for column in columns)] for name, figures in growth.items()], headers))
    seconds = samples.seconds[-1]
    print(f"{len(records)} requests, {options.concurrency} at once, in {seconds:.0f} s; {len(failures)} failed")
    grown = [name for name, figures in growth.items() if figures["second_half_mib"] > options.max_growth_mib]
    for name in grown:
        print(f"{name} grew by {growth[name]['second_half_mib']} MiB; at most {options.max_growth_mib:g} are allowed")
    data = {
        "requests": len(records),
        "failures": failures[:20],
        "num_failed": len(failures),
        "output_tokens": sum(record.output_tokens for record in records),
        "growth": growth,
        "samples": {"seconds": samples.seconds, "num_sent": samples.num_sent, "resident_mib": samples.resident_mib},
    }
    keep_result("soak", argv, data, options)
    return 1 if failures or grown else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="splitserve bench soak", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=positive, default=20_000, metavar="N", help="in all")
    add("--concurrency", type=positive, default=64, metavar="N", help="requests in flight")
    add("--max-input-len", type=positive, default=500, metavar="TOKENS", help="prompts have 1 to this many")
    add("--max-output-len", type=positive, default=24, metavar="TOKENS", help="answers have 1 to this many")
    add("--kv-memory-mib", type=positive, default=64, metavar="MIB", help="KV memory of each worker")
    add("--sample-seconds", type=positive_seconds, default=2.0, metavar="SECONDS", help="between two samples")
    add(
        "--max-growth-mib",
        type=finite,
        default=16.0,
        metavar="MIB",
        help="maximum growth of any process over the second half",
    )
    add("--seed", type=int, default=0, help="seed of prompts and lengths")
    add_result_options(parser, always=True)
    options = parser.parse_args(list(argv))
    if options.max_input_len + options.max_output_len > MAX_MODEL_LEN:
        parser.error(f"--max-input-len and --max-output-len must be at most {MAX_MODEL_LEN} together")
    return options
