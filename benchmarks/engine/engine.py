"""``splitserve bench engine``: decode steps and prefills of one GPU, as shares of this GPU's ceilings.

Weights are random at the true shape. The ceilings are measured in the same run: a large device-to-device copy (bytes
read and written), the fastest of several operations that only read, and a large bf16 matrix product. A decode step's
floors are the times to read weights and KV once at the copy's and at the read bandwidth; a prefill's share is its
floating-point operations over its time and the product's rate (:mod:`.step_costs`). Steps are greedy and launched as in
a worker: the next one while the last one runs, its tokens looked up on the device.
"""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.engine.step_costs import (
    Ceilings,
    DecodeFigure,
    PrefillFigure,
    decode_figure,
    prefill_figure,
)
from splitserve.benchmarks.kernels.device_timing import read_bandwidth
from splitserve.benchmarks.kernels.times import Span, by_kernel, device_spans
from splitserve.common.errors import ConfigError
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.demo.checkpoint import SHAPES, shape_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MAX_TOKENS_ALONE, MixedSize
from splitserve.models.runner.launched import PendingStep
from splitserve.models.step_costs import decode_bytes, prefill_flops
from splitserve.models.weights.loader import load_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.step import UNKNOWN_TOKEN, SampleSpec, ScheduledChunk, StepPlan

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_RESERVE_BYTES = 12 << 30  # for activations of the longest prefill, graphs and workspaces
_WARM_UP_STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if not torch.cuda.is_available():
        raise ConfigError("bench engine measures a CUDA device, and there is none; for a CPU: bench engine-cpu")
    ceilings = measure_ceilings()
    print(
        f"copy {ceilings.copy_bytes_per_second / 1e12:.3f} TB/s, "
        f"read {ceilings.read_bytes_per_second / 1e12:.3f} TB/s, "
        f"bf16 product {ceilings.gemm_flops_per_second / 1e12:.1f} TFLOP/s",
        flush=True,
    )
    models = {shape: _measure(shape, ceilings, arguments) for shape in arguments.shape}
    data = {"ceilings": asdict(ceilings), "models": models}
    keep_result("engine", list(argv or ()), data, arguments)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve bench engine", description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama-3.1-8b", "qwen3-8b"], choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    parser.add_argument("--batch", type=positive, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=positive, nargs="*", default=[512, 1024, 2048, 8192])
    parser.add_argument("--prefill", type=positive, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument(
        "--prefix",
        type=not_negative,
        default=0,
        metavar="TOKENS",
        help="tokens before each prefill whose KV exists already",
    )
    parser.add_argument("--steps", type=positive, default=30, help="decode steps that are timed per case")
    parser.add_argument("--block-size", type=positive, default=64, metavar="TOKENS")
    parser.add_argument("--attention-backend", default="auto", help="auto, flashinfer or triton")
    parser.add_argument("--linear-backend", default="auto", help="auto, or a backend of the operation pack_linear")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="time of each case by kernel")
    add_result_options(parser, always=True)
    return parser.parse_args(argv)


def measure_ceilings() -> Ceilings:
    """Measure copy bandwidth (read + write), read bandwidth and bf16 GEMM rate of the current device."""
    left, right = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    gemm_seconds = _median_seconds(lambda: left @ right)
    device = torch.device("cuda", torch.cuda.current_device())
    return Ceilings(_copy_rate(), read_bandwidth(device), 2 * 8192**3 / gemm_seconds)


def _copy_rate() -> float:
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))


def _median_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    seconds: list[float] = []
    for index in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= 3:
            seconds.append(start.elapsed_time(end) * 1e-3)
    return float(statistics.median(seconds))


def _measure(shape: str, ceilings: Ceilings, arguments: argparse.Namespace) -> dict[str, Any]:
    bench = EngineBench(shape_config(shape), ceilings, arguments)
    print(f"\n{shape}: {bench.describe()}", flush=True)
    decode = [
        figure
        for batch in arguments.batch
        for context in arguments.context
        if (figure := bench.decode(batch, context)) is not None
    ]
    headers = ["batch", "context", "step ms", "copy floor ms", "share", "read floor ms", "share", "busy share"]
    print(table([list(asdict(figure).values()) for figure in decode], headers), flush=True)
    prefill = [bench.prefill(tokens) for tokens in arguments.prefill]
    headers = ["tokens", "ms", "tokens/s", "GEMM share"]
    print(table([list(asdict(figure).values()) for figure in prefill], headers), flush=True)
    result = {
        "backends": dict(bench.backends),
        "capture_seconds": bench.capture_seconds,
        "decode": [asdict(figure) for figure in decode],
        "prefill": [asdict(figure) for figure in prefill],
        "profiles": bench.profiles,
    }
    bench.close()
    return result


class EngineBench:
    """One model on the current device, with all of its memory."""

    def __init__(self, config: ModelConfig, ceilings: Ceilings, arguments: argparse.Namespace) -> None:
        dtype, device = _DTYPES[arguments.dtype], torch.device("cuda", torch.cuda.current_device())
        overrides = {}
        if arguments.attention_backend != "auto":
            overrides["make_attention"] = arguments.attention_backend
        if arguments.linear_backend != "auto":
            overrides["pack_linear"] = arguments.linear_backend
        kernels = select_kernels(device, dtype, overrides)
        self.backends = kernels.backends
        self.profiles: dict[str, list[dict[str, Any]]] = {}
        self._config = config
        self._ceilings = ceilings
        self._arguments = arguments
        started = time.perf_counter()
        model = load_model("", config, dtype=dtype, device=device, load_format="dummy", kernels=kernels)
        torch.cuda.synchronize()
        self._load_seconds = time.perf_counter() - started
        self._block_size = arguments.block_size
        shape = (config.num_layers, config.num_kv_heads, 2, self._block_size, config.head_dim)
        block_elements = torch.Size(shape).numel()
        free, _ = torch.cuda.mem_get_info()
        cases = [batch * (context + 64) for batch in arguments.batch for context in arguments.context]
        prompts = [arguments.prefix + num_tokens for num_tokens in arguments.prefill]
        wanted = max([*cases, *prompts, self._block_size]) // self._block_size + max([*arguments.batch, 1]) + 2
        num_blocks = min((free - _KV_RESERVE_BYTES) // (block_elements * dtype.itemsize), wanted)
        kv_cache = random_kv((num_blocks, *shape), dtype, device)
        longest = max([*prompts, *arguments.context, 1024]) + 256
        self._runner: CudaRunner | None = CudaRunner(
            model, kv_cache, max_num_seqs=max([*arguments.batch, 1]), max_model_len=longest
        )
        self._order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._itemsize = dtype.itemsize
        sizes = sorted(set(arguments.batch))
        self.capture_seconds = 0.0
        if sizes and not arguments.enforce_eager:
            self.capture_seconds = self._runner.capture(sizes)
            if short := [MixedSize(0, tokens) for tokens in arguments.prefill if tokens <= MAX_TOKENS_ALONE]:
                self.capture_seconds += self._runner.capture_mixed(short)

    def describe(self) -> str:
        backends = ", ".join(f"{operation} {backend}" for operation, backend in self.backends.items())
        return (
            f"weights in {self._load_seconds:.1f} s, {len(self._order)} KV blocks, "
            f"graphs in {self.capture_seconds:.1f} s; {backends}"
        )

    def close(self) -> None:
        """Free the device's memory."""
        self._runner = None
        torch.cuda.empty_cache()

    # ---- decode ----

    def decode(self, batch: int, context: int) -> DecodeFigure | None:
        """Measure a decode step; None if the KV of these sequences doesn't fit."""
        num_steps = self._arguments.steps + _WARM_UP_STEPS
        # The timed steps see `context` tokens on average.
        first = max(1, context - num_steps // 2)
        per_sequence = -(-(first + num_steps + 1) // self._block_size)
        if batch * per_sequence > len(self._order):
            return None
        tables = [self._order[index * per_sequence : (index + 1) * per_sequence] for index in range(batch)]
        self._steps(tables, first, _WARM_UP_STEPS)
        seconds = self._steps(tables, first + _WARM_UP_STEPS, self._arguments.steps) / self._arguments.steps
        spans = self._profile(f"decode {batch}x{context}", lambda: self._steps(tables, first, 10), 10)
        num_bytes = decode_bytes(self._config, batch, context, self._itemsize)
        return decode_figure(batch, context, num_bytes, seconds, spans=spans, ceilings=self._ceilings)

    def _steps(self, tables: list[list[int]], first: int, count: int) -> float:
        """Run ``count`` decode steps, each launched while the previous one runs; returns their seconds."""
        assert self._runner is not None
        pending: deque[PendingStep] = deque()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step in range(count):
            chunks = []
            for index, blocks in enumerate(tables):
                spec = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=first + step + 1)
                token, previous = (1, None) if step == 0 else (UNKNOWN_TOKEN, index)
                table = blocks[: (first + step) // self._block_size + 1]
                chunks.append(ScheduledChunk([token], first + step, table, spec, previous))
            pending.append(self._runner.launch(StepPlan(chunks)))
            if len(pending) > 1:
                pending.popleft().wait()
        while pending:
            pending.popleft().wait()
        return time.perf_counter() - started

    # ---- prefill ----

    def prefill(self, num_tokens: int) -> PrefillFigure:
        """Measure the prefill of a prompt's end in one step, after its prefix."""
        assert self._runner is not None
        prefix = self._arguments.prefix
        end = prefix + num_tokens
        spec = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=end)
        tokens = torch.randint(0, self._config.vocab_size, (num_tokens,)).tolist()
        plan = StepPlan([ScheduledChunk(tokens, prefix, self._order[: -(-end // self._block_size)], spec)])
        runner = self._runner
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            runner.run(plan)
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds[1:])
        self._profile(f"prefill {num_tokens}", lambda: runner.run(plan), 1)
        return prefill_figure(num_tokens, prefill_flops(self._config, num_tokens, prefix), median, self._ceilings)

    # ---- where the time goes ----

    def _profile(self, case: str, run: Callable[[], object], count: int) -> list[Span]:
        """Return the device's spans in ``run``; with ``--profile`` note the kernels of ``case``, too."""
        spans = device_spans(run)
        if self._arguments.profile:
            self.profiles[case] = by_kernel(spans, count)
        return spans


def random_kv(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make KV memory of random content, block by block."""
    kv_cache = torch.empty(tuple(shape), dtype=dtype, device=device)
    for block in kv_cache:
        block.normal_()
    return kv_cache


if __name__ == "__main__":
    raise SystemExit(main())
