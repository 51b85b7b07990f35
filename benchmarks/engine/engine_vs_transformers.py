"""``splitserve bench engine-cpu``: our runner against transformers' ``generate``, alternating in one process.

Both load the same checkpoint in the same dtype with the same number of threads. In each round both generate greedily
from the same prompts, one after the other, and the medians over all rounds are compared, so that a temporary slowness
of the machine affects both. Prefill is the time to the first token; decode is the time between two tokens.
"""

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import SHAPES, write_demo_model
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

_BLOCK_SIZE = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Timing:
    """Times and tokens of one run of generation."""

    prefill_seconds: float  # to the first token
    step_seconds: list[float]  # of each later step
    token_ids: list[list[int]]  # of each sequence


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of one case."""

    case: str
    ours_ms: float
    transformers_ms: float
    ratio: float  # transformers' time over ours: above 1 we are faster
    samples: int


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as scratch:
        path = Path(arguments.model) if arguments.model else write_demo_model(scratch, shape=arguments.shape)
        comparisons, same, total = _compare(path, arguments)
    print(f"{'case':28} {'ours ms':>10} {'transformers ms':>16} {'ratio':>7} {'samples':>8}")
    for row in comparisons:
        print(f"{row.case:28} {row.ours_ms:10.1f} {row.transformers_ms:16.1f} {row.ratio:6.2f}x {row.samples:8d}")
    print(f"greedy tokens: {same} of {total} sequences are identical")
    if arguments.json:
        report = {
            "command": "splitserve bench engine-cpu",
            "settings": {
                name: getattr(arguments, name)
                for name in ("model", "shape", "dtype", "prefill_tokens", "context", "batch", "steps", "rounds")
            },
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "machine": {"processor": platform.processor(), "capability": torch.backends.cpu.get_cpu_capability()},
            "sequences_identical": [same, total],
            "results": [asdict(row) for row in comparisons],
        }
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve bench engine-cpu", description=__doc__)
    parser.add_argument("--model", default="", help="checkpoint directory; without it a demo model of --shape is made")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=sorted(_DTYPES))
    parser.add_argument("--threads", type=not_negative, default=0, help="number of threads; 0: PyTorch's default")
    parser.add_argument("--prefill-tokens", type=positive, default=512)
    parser.add_argument("--context", type=positive, default=128, help="prompt tokens before decode is timed")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=positive, default=16, help="decode steps per round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", default="", help="also write the report to this file")
    return parser.parse_args(argv)


def _compare(path: Path, arguments: argparse.Namespace) -> tuple[list[Comparison], int, int]:
    reference = TransformersGenerator(path, _DTYPES[arguments.dtype])
    longest = max(arguments.prefill_tokens + 1, arguments.context + arguments.steps + 1)
    ours = RunnerGenerator(path, _DTYPES[arguments.dtype], max(arguments.batch), longest)
    cases = [("prefill", 1, arguments.prefill_tokens, 0)]
    cases += [("decode", batch, arguments.context, arguments.steps) for batch in arguments.batch]
    vocab_size = ours.vocab_size
    comparisons = []
    same = total = 0
    for phase, batch, num_tokens, steps in cases:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(0, vocab_size, (batch, num_tokens), generator=generator).tolist()
        samples: dict[str, list[float]] = {"ours": [], "transformers": []}
        for round_index in range(arguments.rounds + 1):
            ours_timing = ours.generate(prompts, steps)
            reference_timing = reference.generate(prompts, steps)
            if round_index == 0:  # the first round warms up
                pairs = zip(ours_timing.token_ids, reference_timing.token_ids, strict=True)
                same += sum(left == right for left, right in pairs)
                total += batch
                continue
            for name, timing in (("ours", ours_timing), ("transformers", reference_timing)):
                samples[name] += timing.step_seconds if phase == "decode" else [timing.prefill_seconds]
        label = f"{phase}, batch {batch}, {num_tokens} tokens"
        comparisons.append(_comparison(label, samples["ours"], samples["transformers"]))
    return comparisons, same, total


def _comparison(case: str, ours: list[float], reference: list[float]) -> Comparison:
    ours_ms, reference_ms = 1e3 * statistics.median(ours), 1e3 * statistics.median(reference)
    return Comparison(case, ours_ms, reference_ms, reference_ms / ours_ms, len(ours))


class RunnerGenerator:
    """Greedy generation with our runner, scheduled as in a mixed worker: prompts in one step, then decode steps."""

    def __init__(self, path: Path, dtype: torch.dtype, max_sequences: int, max_tokens: int) -> None:
        config = load_model_config(path)
        model = load_model(path, config, dtype=dtype, device=torch.device("cpu"))
        self._blocks_per_sequence = -(-max_tokens // _BLOCK_SIZE)
        num_blocks = max_sequences * self._blocks_per_sequence
        shape = (num_blocks, config.num_layers, config.num_kv_heads, 2, _BLOCK_SIZE, config.head_dim)
        self._runner = ModelRunner(model, torch.zeros(shape, dtype=dtype))
        # Shuffled like blocks of a pool that has served for a while.
        self._blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self.vocab_size = config.vocab_size

    def generate(self, prompts: list[list[int]], steps: int) -> Timing:
        sequences = [list(prompt) for prompt in prompts]
        num_computed = [0] * len(prompts)
        seconds = []
        for _ in range(steps + 1):
            started = time.perf_counter()
            chunks = [self._chunk(index, sequence, num_computed[index]) for index, sequence in enumerate(sequences)]
            output = self._runner.run(StepPlan(chunks))
            for index, (sequence, token_id) in enumerate(zip(sequences, output.token_ids, strict=True)):
                assert token_id is not None
                num_computed[index] = len(sequence)
                sequence.append(token_id)
            seconds.append(time.perf_counter() - started)
        generated = [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
        return Timing(seconds[0], seconds[1:], generated)

    def _chunk(self, index: int, sequence: list[int], num_computed: int) -> ScheduledChunk:
        first = index * self._blocks_per_sequence
        blocks = self._blocks[first : first + self._blocks_per_sequence]
        greedy = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=len(sequence))
        return ScheduledChunk(sequence[num_computed:], num_computed, blocks, greedy)


class _StepClock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Recorder of the time after each token of ``generate``; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersGenerator:
    """Greedy generation with transformers' defaults: ``generate`` with its own cache and attention."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], steps: int) -> Timing:
        clock = _StepClock()
        inputs = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=steps + 1,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        times = [started, *clock.times]
        seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Timing(seconds[0], seconds[1:], output[:, inputs.shape[1] :].tolist())


if __name__ == "__main__":
    raise SystemExit(main())
