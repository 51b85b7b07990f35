"""``splitserve bench layout``: cost of the order inside a KV block for attention, per backend.

Our blocks are ``[layer, kv_head, 2, token, head_dim]``, so that a block is one piece for a hand-over. Attention over
one layer of them is compared with attention over a plain tensor per layer. The alternative order, heads outside layers,
would make every range of heads one piece; it is measured with each (block, head) as a block of a single head, since
kernels require the heads of a block to be adjacent, against plain tensors viewed in the same way. A ratio is the time
on blocks over the time on plain tensors: above 1 the order has a cost. Blocks are in random order, calls take the
layers in turn, and the two sides are timed alternately.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.kernels.case import Call
from splitserve.benchmarks.kernels.device_timing import eager_seconds, relative_error, seconds_per_call
from splitserve.benchmarks.kernels.kernels import DTYPES, the_device
from splitserve.benchmarks.kernels.kv_cases import attention_calls, layers_that_fit, layers_to_call, shuffled_batch
from splitserve.common.errors import ConfigError
from splitserve.kernels.api import AttentionShape, Kernels, PagedBatch
from splitserve.kernels.registry import Target, backends, select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.demo.checkpoint import SHAPES, shape_config
from splitserve.orchestration.cli.command_parser import CommandParser

_ROUNDS = 3
_HEADERS = ["case", "backend", "layers", "plain us", "blocks us", "ratio", "heads outside layers, ratio", "difference"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of one case on one backend."""

    phase: str
    batch: int
    context: int
    backend: str
    num_layers: int
    plain_us: float
    blocks_us: float
    ratio: float  # time on our blocks / time on plain tensors
    heads_outside_ratio: float  # likewise for the alternative order
    difference: float  # largest relative error between their answers, which read the same content

    def cells(self) -> list[object]:
        case = f"{self.phase} {self.batch} x {self.context}"
        return [
            case, self.backend, self.num_layers, self.plain_us, self.blocks_us,
            f"{self.ratio:.3f}", f"{self.heads_outside_ratio:.3f}", f"{self.difference:.1g}",
        ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    device, dtype = the_device(arguments.device), DTYPES[arguments.dtype]
    config = shape_config(arguments.shape)
    names = _backends(arguments.backend, Target(device, dtype, config.head_dim))
    bench = LayoutBench(config, arguments.block_size, dtype, device)
    figures: list[Figure] = []
    groups = [*(("decode", batch, arguments.context) for batch in arguments.batch), ("prompt", 1, arguments.prefill)]
    for phase, batch, contexts in groups:
        new = [figure for context in contexts for figure in bench.measure(phase, batch, context, names)]
        print(table([figure.cells() for figure in new], _HEADERS), flush=True)
        figures += new
    data = {"shape": arguments.shape, "dtype": arguments.dtype, "block_size": arguments.block_size}
    data["figures"] = [asdict(figure) for figure in figures]
    keep_result("layout", list(argv or ()), data, arguments)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve bench layout", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=positive, nargs="*", default=[1, 8, 64])
    contexts = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument(
        "--context", type=positive, nargs="*", default=contexts, help="contexts of sequences that decode"
    )
    parser.add_argument(
        "--prefill", type=positive, nargs="*", default=contexts, metavar="TOKENS", help="lengths of prompts"
    )
    parser.add_argument("--backend", nargs="*", default=[], help="backends of attention; none: all that run here")
    parser.add_argument("--block-size", type=positive, default=64, metavar="TOKENS")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    add_result_options(parser, always=True)
    return parser.parse_args(argv)


def _backends(wanted: Sequence[str], target: Target) -> list[str]:
    """Return the backends to measure. Unless requested by name, hybrid is left out (it combines two others), and on a
    GPU the reference.

    Raises :class:`ConfigError` for one that can't run here.
    """
    reasons = backends("make_attention", target)
    for name in wanted:
        if name not in reasons:
            raise ConfigError(f"attention has no backend {name!r}; there are {', '.join(reasons)}")
        if reason := reasons[name]:
            raise ConfigError(f"attention can't run on {name}: {reason}")
    others = {"hybrid", "reference"} if target.device.type == "cuda" else {"hybrid"}
    return list(wanted) or [name for name, reason in reasons.items() if reason is None and name not in others]


@dataclass(frozen=True, slots=True)
class Side:
    """One layout of a batch's KV: the shape as given to a backend, and its layers."""

    shape: AttentionShape
    batch: PagedBatch
    query: Tensor
    layers: Sequence[Tensor]

    def calls(self, kernels: Kernels) -> list[Call]:
        return attention_calls(kernels, self.shape, self.batch, self.query, self.layers)


class LayoutBench:
    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def measure(self, phase: str, batch_size: int, context: int, names: Sequence[str]) -> Iterator[Figure]:
        """Yield a result per backend; none if the KV of two layers, twice, doesn't fit."""
        query_len = 1 if phase == "decode" else context
        batch = shuffled_batch([(query_len, context)] * batch_size, self._block_size)
        num_blocks = sum(len(blocks) for blocks in batch.block_tables)
        config, device = self._config, self._device
        head_elements = 2 * self._block_size * config.head_dim
        layer_bytes = num_blocks * config.num_kv_heads * head_elements * self._dtype.itemsize
        num_layers = layers_that_fit(config.num_layers, 2 * layer_bytes, device)
        if num_layers == 0:
            print(f"{phase} {batch_size} x {context} doesn't fit this device's memory", flush=True)
            return
        sizes = (config.num_kv_heads, 2, self._block_size, config.head_dim)
        ours = torch.empty((num_blocks, num_layers, *sizes), dtype=self._dtype, device=device).normal_()
        query = torch.empty(query_len * batch_size, config.num_heads, config.head_dim, dtype=self._dtype, device=device)
        query.normal_()
        shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, self._block_size, num_layers, self._dtype, device
        )
        for name in names:
            kernels = select_kernels(device, self._dtype, {"make_attention": name}, config.head_dim)
            is_eager = device.type == "cuda" and (phase == "prompt" or name == "reference")
            compare = partial(self._compare, kernels=kernels, is_eager=is_eager)
            plain_seconds, blocks_seconds, difference = compare(*sides(shape, batch, query, ours))
            plain, outside, other = compare(*single_head_sides(shape, batch, query, ours))
            yield Figure(
                phase, batch_size, context, name, num_layers, 1e6 * plain_seconds, 1e6 * blocks_seconds,
                blocks_seconds / plain_seconds, outside / plain, max(difference, other),
            )  # fmt: skip

    def _compare(self, plain: Side, blocks: Side, *, kernels: Kernels, is_eager: bool) -> tuple[float, float, float]:
        """Return the seconds of a call on each side, and the difference between their answers."""
        calls = (plain.calls(kernels), blocks.calls(kernels))
        difference = relative_error(calls[1][0](), calls[0][0]())
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for side, seconds in zip(calls, times, strict=True):
                seconds.append(eager_seconds(side) if is_eager else seconds_per_call(side, self._device))
        return statistics.median(times[0]), statistics.median(times[1]), difference


def sides(shape: AttentionShape, batch: PagedBatch, query: Tensor, ours: Tensor) -> tuple[Side, Side]:
    """Return plain tensors per layer and our blocks, ``ours`` [num_blocks, L, G, 2, B, D]."""
    layers = layers_to_call(shape.num_layers, batch)
    plain = Side(replace(shape, num_layers=1), batch, query, [ours[:, layer].contiguous() for layer in layers])
    return plain, Side(shape, batch, query, [ours[:, layer] for layer in layers])


def single_head_sides(shape: AttentionShape, batch: PagedBatch, query: Tensor, ours: Tensor) -> tuple[Side, Side]:
    """Return plain tensors per layer and blocks with heads outside layers, each (block, head) a block of one head.

    A sequence becomes G sequences, each with the query heads that share one key/value head.
    """
    heads, layers = shape.num_kv_heads, layers_to_call(shape.num_layers, batch)
    group = shape.num_heads // heads
    wide = PagedBatch(
        [length for length in batch.query_lens for _ in range(heads)],
        [length for length in batch.context_lens for _ in range(heads)],
        [[block * heads + head for block in table] for table in batch.block_tables for head in range(heads)],
    )
    per_sequence = query.view(len(batch.query_lens), -1, heads, group, shape.head_dim)  # sequences are alike
    regrouped = per_sequence.transpose(1, 2).reshape(-1, group, shape.head_dim)
    single = replace(shape, num_heads=group, num_kv_heads=1)
    # [num_blocks, G, L, 2, B, D], and then (num_blocks, G) as blocks: [num_blocks * G, L, 1, 2, B, D].
    outside = ours.transpose(1, 2).contiguous().flatten(0, 1).unsqueeze(2)
    plain = [outside[:, layer].contiguous() for layer in layers]
    return (
        Side(replace(single, num_layers=1), wide, regrouped, plain),
        Side(single, wide, regrouped, [outside[:, layer] for layer in layers]),
    )


if __name__ == "__main__":
    raise SystemExit(main())
