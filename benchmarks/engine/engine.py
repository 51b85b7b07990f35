"""``splitserve bench engine``: decode steps and prefills of one GPU, as shares of this GPU's ceilings.

Weights are random at the true shape. The ceilings are measured in the same run: a large device-to-device copy (bytes
read and written), the fastest of several operations that only read, and a large bf16 matrix product. A decode step's
floors are the times to read weights and KV once at the copy's and at the read bandwidth. Of a dense model the step is
compared with its parts, too: its products by themselves, and its KV at the copy's bandwidth. A prefill's share is its
floating-point operations over its time and the product's rate (:mod:`.step_costs`). Of experts, floors count those that
the steps hit, which are counted before graphs are captured. Steps are launched as in a worker: the next one while the
last one runs, its tokens looked up on the device. Ways to draw take turns, so that each is compared with greedy steps
of the same round.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any, TypeVar

import torch

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.shapes import SHAPE_HELP, model_shape
from splitserve.benchmarks.engine.ceilings import (
    bench_device,
    free_bytes,
    measure_ceilings,
    product_rate,
    products_of,
    synchronize,
)
from splitserve.benchmarks.engine.decode_steps import DecodeRun, HitExperts
from splitserve.benchmarks.engine.sampling_modes import GREEDY, sampling_modes
from splitserve.benchmarks.engine.sampling_modes import NAMES as MODES
from splitserve.benchmarks.engine.step_cases import add_cases, decode_cases, with_layers
from splitserve.benchmarks.engine.step_costs import (
    Ceilings,
    DecodeFigure,
    MixedFigure,
    PrefillFigure,
    decode_figure,
    mixed_figure,
    prefill_figure,
)
from splitserve.benchmarks.engine.step_memory import Sequences, StepMemory
from splitserve.benchmarks.kernels.times import Span, by_kernel, device_spans
from splitserve.common.errors import ConfigError
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.demo.published import named_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import TOKENS_ALONE, MixedSize, mixed_sizes
from splitserve.models.step_costs import decode_bytes, prefill_flops
from splitserve.models.weights.loader import load_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.engine_config import DEVICE_DEFAULTS
from splitserve.protocol.step import ScheduledChunk, StepPlan

Figure = TypeVar("Figure")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WARM_UP_STEPS = 4
_PROFILED_STEPS = 10
_PREFILLS_OF_A_ROUND = 4
_NUM_PROMPT_TOKENS = 1000  # that penalties know of each sequence
_DECODE_HEADERS = (
    "batch", "context", "step ms", "copy floor ms", "share", "read floor ms", "share", "busy share", "sampling",
    "least", "most", "beyond greedy", "experts hit", "products and KV ms", "share",
)  # fmt: skip
_MIXED_HEADERS = ("batch", "context", "prompt tokens", "step ms", "least", "most")
_PREFILL_HEADERS = ("tokens", "ms", "tokens/s", "GEMM share", "least", "most", "share beside")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        raise ConfigError("bench engine measures a CUDA device, and there is none; for a CPU: bench engine-cpu")
    ceilings = measure_ceilings()
    print(
        f"copy {ceilings.copy_bytes_per_second / 1e12:.3f} TB/s, "
        f"read {ceilings.read_bytes_per_second / 1e12:.3f} TB/s, "
        f"bf16 product {ceilings.gemm_flops_per_second / 1e12:.1f} TFLOP/s",
        flush=True,
    )
    models = {}
    for shape in arguments.shape:
        config = with_layers(named_config(shape), arguments.layers)
        name = Path(shape).resolve().name
        models[shape if name in models else name] = measure_shape(config, shape, ceilings, arguments)
    data = {"ceilings": asdict(ceilings), "models": models}
    keep_result("engine", list(argv or ()), data, arguments)
    return 1 if any("errors" in found for found in models.values()) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's options."""
    parser = CommandParser(prog="splitserve bench engine", description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama-3.1-8b", "qwen3-8b"], type=model_shape, help=SHAPE_HELP)
    parser.add_argument("--layers", type=positive, metavar="N", help="only the first N layers, where all don't fit")
    parser.add_argument(
        "--sampling", nargs="+", default=[GREEDY], choices=MODES, help="ways to draw, beside greedy ones"
    )
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="rounds of each case")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    add_cases(parser)
    parser.add_argument("--steps", type=positive, default=30, help="decode steps that are timed per case")
    parser.add_argument("--block-size", type=positive, default=64, metavar="TOKENS")
    parser.add_argument("--attention-backend", default="auto", help="auto, flashinfer or triton")
    parser.add_argument("--linear-backend", default="auto", help="auto, or a backend of the operation pack_linear")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--busy", action=argparse.BooleanOptionalAction, default=True, help="measure the device's busy share, too"
    )
    parser.add_argument("--profile", action="store_true", help="time of each case by kernel")
    add_result_options(parser, always=True)
    arguments = parser.parse_args(argv)
    arguments.case = decode_cases(arguments)
    return arguments


def measure_shape(config: ModelConfig, name: str, ceilings: Ceilings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and print all cases of one model."""
    bench = EngineBench(config, ceilings, arguments)
    print(f"\n{name}: {bench.describe()}", flush=True)
    errors: list[str] = []
    beside = [(batch, context, tokens) for (batch, tokens), context in product(arguments.mixed, arguments.context)]
    # Decode comes last, and profiles of the others: once a profiler was there, the host takes longer for each kernel.
    prefill = _figures("prefill", bench.prefill, [(tokens,) for tokens in arguments.prefill], errors)
    _print_table(prefill, _PREFILL_HEADERS)
    mixed = _figures("mixed", bench.mixed, beside, errors)
    _print_table(mixed, _MIXED_HEADERS)
    decode = _figures("decode", bench.decode, arguments.case, errors)
    _print_table(decode, _DECODE_HEADERS)
    if arguments.profile:
        _figures("profile of", bench.profile, bench.unprofiled, errors)
    print("\n".join(errors), end="\n" if errors else "", flush=True)
    result = {
        "backends": dict(bench.backends),
        "load_seconds": bench.load_seconds,
        "capture_seconds": bench.capture_seconds,
        "decode": [asdict(figure) for figure in decode],
        "mixed": [asdict(figure) for figure in mixed],
        "prefill": [asdict(figure) for figure in prefill],
        "profiles": bench.profiles,
        **({"errors": errors} if errors else {}),
    }
    bench.close()
    return result


def _print_table(figures: Sequence[Any], headers: Sequence[str]) -> None:
    if figures:
        print(table([list(asdict(figure).values()) for figure in figures], headers), flush=True)


def _figures(
    phase: str, measure: Callable[..., list[Figure]], cases: Sequence[tuple[Any, ...]], errors: list[str]
) -> list[Figure]:
    """Return the figures of all cases. An error is noted: the figures of other cases count all the same."""
    figures = []
    for case in cases:
        try:
            figures += measure(*case)
        except Exception as error:
            sizes = " x ".join(str(each) for each in case if not callable(each))
            errors.append(f"{phase} {sizes}: {error!r:.500}")
    return figures


class EngineBench:
    """One model on the current device, with all of its memory."""

    def __init__(self, config: ModelConfig, ceilings: Ceilings, arguments: argparse.Namespace) -> None:
        dtype, device = _DTYPES[arguments.dtype], bench_device()
        overrides = {}
        if arguments.attention_backend != "auto":
            overrides["make_attention" if config.latent is None else "make_latent_attention"] = (
                arguments.attention_backend
            )
        if arguments.linear_backend != "auto":
            overrides["pack_linear"] = arguments.linear_backend
        kernels = select_kernels(device, dtype, overrides, config.head_dim, has_sinks=config.sinks)
        self._hits = HitExperts(kernels.pack_router)
        self.backends = kernels.backends
        self.profiles: dict[str, list[dict[str, Any]]] = {}
        self.unprofiled: list[tuple[str, Callable[[], object], int]] = []
        self._config = config
        self._ceilings = ceilings
        self._arguments = arguments
        self._dtype = dtype
        self._names = [GREEDY, *(name for name in arguments.sampling if name != GREEDY)]
        started = time.perf_counter()
        kernels = replace(kernels, pack_router=self._hits)
        model = load_model("", config, dtype=dtype, device=device, load_format="dummy", kernels=kernels)
        synchronize()
        self.load_seconds = time.perf_counter() - started
        cases = list(starmap(self._decoded, arguments.case))
        cases += [
            self._mixed(batch, tokens, context)
            for (batch, tokens), context in product(arguments.mixed, arguments.context)
        ]
        cases += [self._prefilled(num_tokens) for num_tokens in arguments.prefill]
        self._memory = StepMemory(
            config, cases, block_size=arguments.block_size, dtype=dtype, device=device, most_bytes=free_bytes()
        )
        self._files = tempfile.TemporaryDirectory(prefix="splitserve-bench-")
        self._modes = sampling_modes(self._names, config.vocab_size, Path(self._files.name))
        self._runner: CudaRunner | None = CudaRunner(
            model,
            self._memory.tensors,
            max_num_seqs=max([batch for batch, _ in (*arguments.case, *arguments.mixed)], default=1),
            max_model_len=max([*(case.length for case in cases), 1024]) + arguments.block_size,
            model_dir=Path(self._files.name),
        )
        self._experts_hit = {
            (batch, context): self._count_experts(batch, context)
            for batch, context in arguments.case
            if self.has_room(batch, context)
        }
        self.capture_seconds = 0.0 if arguments.enforce_eager else self._capture()

    def _capture(self) -> float:
        """Capture the graphs of all steps; return the seconds taken."""
        assert self._runner is not None
        sizes = sorted({batch for batch, _ in self._experts_hit})
        seconds = self.capture(sizes) if sizes else 0.0
        mixed = [MixedSize(0, tokens) for tokens in self._arguments.prefill if tokens <= TOKENS_ALONE[-1]]
        if self._arguments.mixed:  # as of a worker
            limits = DEVICE_DEFAULTS["cuda"]
            sized = limits.max_num_prefill_tokens_within_objective
            most = max(batch for batch, _ in self._arguments.mixed)
            sizes = mixed_sizes(most, limits.max_num_prefill_tokens_beside_decode, 1, sized)
            mixed += [size for size in sizes if size.num_decodes]
        if mixed:
            with contextlib.suppress(NotImplementedError):  # some backends have no plans for them
                seconds += self._runner.capture_mixed(mixed)
        return seconds

    def has_room(self, batch: int, context: int) -> bool:
        """Return whether the KV of so many sequences of ``context`` tokens fits."""
        return self._memory.has(self._decoded(batch, context))

    def capture(self, batches: Sequence[int]) -> float:
        """Capture the graphs of decode steps of ``batches`` again; return the seconds taken."""
        assert self._runner is not None
        return self._runner.capture(batches)

    def describe(self) -> str:
        backends = ", ".join(f"{operation} {backend}" for operation, backend in self.backends.items())
        return (
            f"weights in {self.load_seconds:.1f} s, {self._memory.num_blocks} KV blocks, "
            f"graphs in {self.capture_seconds:.1f} s; {backends}"
        )

    def close(self) -> None:
        """Free the device's memory."""
        self._runner = None
        self._memory.tensors = ()
        self._files.cleanup()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # ---- decode ----

    def decode(self, batch: int, context: int) -> list[DecodeFigure]:
        """Measure decode steps, drawn in each way; none if the KV of these sequences doesn't fit."""
        case, options = self._decoded(batch, context), self._arguments
        if not self.has_room(batch, context):
            print(f"decode {batch} x {context} doesn't fit this device's memory", flush=True)
            return []
        assert self._runner is not None
        tables = self._memory.tables(case)
        prompt = range(min(_NUM_PROMPT_TOKENS, self._config.vocab_size))
        runs = {name: DecodeRun(tables, case.start, self._modes[name], prompt) for name in self._names}
        seconds: dict[str, list[float]] = {name: [] for name in self._names}
        products, product_seconds = products_of(self._config, batch, self._dtype), []
        for _ in range(options.repeat):
            if products is not None:
                product_seconds.append(products.seconds(options.steps))
            for name, run in runs.items():
                seconds[name].append(run.seconds(self._runner, _WARM_UP_STEPS, options.steps) / options.steps)
        spans: dict[str, list[Span]] = {}
        for name, run in runs.items() if options.busy or options.profile else ():
            title = f"decode {batch}x{context}" + ("" if name == GREEDY else f" {name}")
            spans[name] = self.profile(title, partial(self._profiled_steps, run), _PROFILED_STEPS)
        hit = self._experts_hit[batch, context]
        num_bytes, weight_bytes = (
            decode_bytes(self._config, batch, length, self._dtype.itemsize, hit) for length in (context, 0)
        )
        return [
            decode_figure(
                batch, context, num_bytes, seconds[name], ceilings=self._ceilings, sampling=name,
                spans=spans.get(name, []), greedy_seconds=seconds[GREEDY], experts_hit=hit,
                product_seconds=product_seconds, kv_bytes=num_bytes - weight_bytes,
            )
            for name in self._names
        ]  # fmt: skip

    def _profiled_steps(self, run: DecodeRun) -> None:
        assert self._runner is not None
        run.seconds(self._runner, _WARM_UP_STEPS, _PROFILED_STEPS - _WARM_UP_STEPS)

    def _decoded(self, batch: int, context: int) -> Sequences:
        """Return the sequences of a case: its timed steps see ``context`` tokens on average."""
        num_steps = self._arguments.steps + _WARM_UP_STEPS
        first = max(1, context - _WARM_UP_STEPS - self._arguments.steps // 2)
        return Sequences(batch, first, first + max(num_steps, _PROFILED_STEPS) + 1)

    def _count_experts(self, batch: int, context: int) -> float | None:
        """Return how many experts of a layer a step has on average; it runs without graphs."""
        if self._config.experts is None:
            return None
        assert self._runner is not None
        case = self._decoded(batch, context)
        run = DecodeRun(self._memory.tables(case), case.start, self._modes[GREEDY])
        run.seconds(self._runner, 1, 1)  # compiles
        with self._hits.noting() as mean_hit:
            run.seconds(self._runner, 1, 3)
            return mean_hit()

    def mixed(self, batch: int, context: int, num_tokens: int) -> list[MixedFigure]:
        """Measure decode steps beside ``num_tokens`` of a prompt, after half of ``context``; none if they don't fit."""
        case, options = self._mixed(batch, num_tokens, context), self._arguments
        if not self._memory.has(case):
            print(f"{batch} x {context} beside {num_tokens} tokens doesn't fit this device's memory", flush=True)
            return []
        assert self._runner is not None
        *tables, own = self._memory.tables(case)
        start = context // 2
        table, others = own.upto(start, start + num_tokens)
        tokens = torch.randint(0, self._config.vocab_size, (num_tokens,)).tolist()
        spec = self._modes[GREEDY].spec(batch, start + num_tokens, None)
        beside = ScheduledChunk(tokens, start, table, spec, other_tables=others)
        run = DecodeRun(tables, self._decoded(batch, context).start, self._modes[GREEDY], beside=beside)
        rounds = [run.seconds(self._runner, _WARM_UP_STEPS, options.steps) for _ in range(options.repeat)]
        title = f"decode {batch}x{context} beside {num_tokens}"
        self.unprofiled.append((title, partial(self._profiled_steps, run), _PROFILED_STEPS))
        return [mixed_figure(batch, context, num_tokens, [seconds / options.steps for seconds in rounds])]

    def _mixed(self, batch: int, num_tokens: int, context: int) -> Sequences:
        """Return the sequences of a mixed case, with one for the prompt; all have room for both."""
        decoded, start = self._decoded(batch, context), context // 2
        length = max(decoded.length, start + num_tokens)
        return Sequences(batch + 1, min(decoded.start, start), length)

    # ---- prefill ----

    def prefill(self, num_tokens: int) -> list[PrefillFigure]:
        """Measure the prefill of a prompt's end in one step, after its prefix; none if it doesn't fit."""
        assert self._runner is not None
        case = self._prefilled(num_tokens)
        if not self._memory.has(case):
            print(f"prefill of {num_tokens} tokens doesn't fit this device's memory", flush=True)
            return []
        table, others = self._memory.tables(case)[0].upto(case.start, case.length)
        spec = self._modes[GREEDY].spec(0, case.length, None)
        tokens = torch.randint(0, self._config.vocab_size, (num_tokens,)).tolist()
        plan = StepPlan([ScheduledChunk(tokens, case.start, table, spec, other_tables=others)])
        runner = self._runner
        rounds, beside = [], []
        runner.run(plan)
        for _ in range(self._arguments.repeat):
            seconds = []
            for _ in range(_PREFILLS_OF_A_ROUND):
                started = time.perf_counter()
                runner.run(plan)
                seconds.append(time.perf_counter() - started)
            rounds.append(statistics.median(seconds))
            beside.append(product_rate(sum(seconds), self._ceilings.gemm_flops_per_second))
        self.unprofiled.append((f"prefill {num_tokens}", lambda: runner.run(plan), 1))
        flops = prefill_flops(self._config, num_tokens, case.start)
        return [prefill_figure(num_tokens, flops, rounds, self._ceilings, beside)]

    def _prefilled(self, num_tokens: int) -> Sequences:
        prefix = self._arguments.prefix
        return Sequences(1, prefix, prefix + num_tokens)

    # ---- where the time goes ----

    def profile(self, case: str, run: Callable[[], object], count: int) -> list[Span]:
        """Return the device's spans in ``run``; with ``--profile`` note the kernels of ``case``, too."""
        spans = device_spans(run)
        if self._arguments.profile:
            self.profiles[case] = by_kernel(spans, count)
        return spans


if __name__ == "__main__":
    raise SystemExit(main())
