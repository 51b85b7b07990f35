"""Figures of the benches on numbers that were worked out by hand: floors, operations, busy shares, TTFT, gaps."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from splitserve.benchmarks.common.stats import Objective, RequestRecord, percentiles_ms, summarise
from splitserve.benchmarks.engine.ceilings import product_shapes
from splitserve.benchmarks.engine.step_costs import (
    Ceilings,
    decode_figure,
    prefill_figure,
)
from splitserve.benchmarks.kernels import device_timing
from splitserve.benchmarks.kernels.case import Case, Target
from splitserve.benchmarks.kernels.cases import cases
from splitserve.benchmarks.kernels.kernels import Ceilings as KernelCeilings
from splitserve.benchmarks.kernels.times import busy_share, by_kernel
from splitserve.benchmarks.kv import handover, handover_served
from splitserve.benchmarks.kv.tier_client import Answer, complete, session
from splitserve.benchmarks.kv.tier_hits import _paces
from splitserve.benchmarks.serving import latency
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.common.errors import SplitserveError
from splitserve.models.config import ModelConfig
from splitserve.models.demo.checkpoint import shape_config
from splitserve.models.demo.published import named_config
from splitserve.models.step_costs import attended_pairs, decode_bytes, kv_token_elements, prefill_flops, weight_elements

CPU = torch.device("cpu")
# Of a layer: q and o 2 x 6 x 4, k and v 2 x 3 x 4, three of 5 x 4: 132 in matrices, 8 in norms.
SIZES = {"hidden_size": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 3, "intermediate_size": 5, "vocab_size": 7}
CONFIG = replace(shape_config("tiny"), **SIZES, num_layers=2, architecture="llama", tie_word_embeddings=False)
UNGATED = replace(CONFIG, architecture="arcee", activation="relu2", mlp_gate=False)
TIED = replace(CONFIG, tie_word_embeddings=True)
CEILINGS = Ceilings(copy_bytes_per_second=1e9, read_bytes_per_second=2e9, gemm_flops_per_second=1e12)


class TestStepCosts:
    def test_weights_that_a_step_reads(self) -> None:
        assert weight_elements(CONFIG) == 2 * (132 + 8) + 4 + 28
        assert weight_elements(TIED) == weight_elements(CONFIG), "the embedding is read as the head"

    def test_bytes_of_a_decode_step(self) -> None:
        assert kv_token_elements(CONFIG) == 2 * 2 * 1 * 3
        assert decode_bytes(CONFIG, batch=3, context=10, itemsize=2) == (312 + 3 * 10 * 12) * 2

    def test_bytes_of_the_experts_that_are_hit(self) -> None:
        """128 experts of three matrices of 2048 x 768 in each of 48 layers, in two bytes or in one."""
        for name, itemsize in (("qwen3-30b-a3b", 2), ("qwen3-30b-a3b-fp8", 1)):
            config = named_config(name)
            whole, hit = decode_bytes(config, 0, 0, 2), decode_bytes(config, 0, 0, 2, experts_hit=8.5)
            assert whole - hit == pytest.approx((128 - 8.5) * 48 * 3 * 2048 * 768 * itemsize)
            assert decode_bytes(config, 0, 0, 2, experts_hit=128.0) == whole

    def test_a_window_bounds_what_is_read(self) -> None:
        config = replace(CONFIG, window=4, sliding_layers=(1,))
        assert decode_bytes(config, 3, 10, 2) == (312 + 3 * (10 + 4) * 6) * 2

    @pytest.mark.parametrize("window", [None, 1, 5, 30])
    def test_pairs_within_a_window(self, window: int | None) -> None:
        for query_len, context in ((1, 1), (1, 12), (7, 12), (12, 12), (3, 20)):
            seen = [min(position + 1, window or 99) for position in range(context - query_len, context)]
            assert attended_pairs(query_len, context, window) == sum(seen)

    def test_operations_of_a_prefill(self) -> None:
        products = 2 * 2 * 132 * 5  # two operations per weight, two layers, five tokens
        head = 2 * 28
        # 1 + 2 + 3 + 4 + 5 pairs of a query and a key; for each head and layer a product with the key and one with
        # the value, 2 x 3 operations each.
        assert prefill_flops(CONFIG, 5) == products + 15 * 2 * 2 * (6 + 6) + head
        after_ten = 11 + 12 + 13 + 14 + 15
        assert prefill_flops(CONFIG, 5, prefix=10) == products + after_ten * 2 * 2 * (6 + 6) + head
        assert prefill_flops(TIED, 5) == prefill_flops(CONFIG, 5)

    def test_operations_of_a_true_shape(self) -> None:
        """Llama-3.1-8B has 8.03 billion parameters, 0.53 of them the embedding and as many the head."""
        config = shape_config("llama-3.1-8b")
        assert weight_elements(config) == 7_504_924_672
        assert prefill_flops(config, 1024) / (2 * 6.98e9 * 1024) == pytest.approx(1 + 0.27e12 / 14.3e12, abs=1e-3)

    def test_a_decode_step_against_its_floors(self) -> None:
        spans = [(0.0, 4.0, "a"), (6.0, 10.0, "b")]
        figure = decode_figure(4, 512, 3_000_000, [0.006], spans=spans, ceilings=CEILINGS)
        assert (figure.batch, figure.context) == (4, 512)
        assert (figure.step_ms, figure.floor_ms, figure.floor_share) == pytest.approx((6.0, 3.0, 0.5))
        assert (figure.read_floor_ms, figure.read_floor_share) == pytest.approx((1.5, 0.25))
        assert figure.busy_share == pytest.approx(0.8)

    def test_a_decode_step_against_its_parts(self) -> None:
        """KV takes 0.5 ms at the copy's bandwidth; products count beside the step of their own round."""
        rounds = {"seconds": [0.004, 0.004, 0.005], "product_seconds": [0.001, 0.002, 0.003]}
        figure = decode_figure(4, 512, 2_000_000, ceilings=CEILINGS, kv_bytes=500_000, **rounds)
        assert (figure.parts_ms, figure.parts_share) == pytest.approx((2.5, 0.625))
        alone = decode_figure(4, 512, 2_000_000, [0.004], ceilings=CEILINGS)
        assert (alone.parts_ms, alone.parts_share) == (0.0, 0.0)

    @pytest.mark.parametrize("config", [shape_config("llama-3.1-8b"), UNGATED], ids=["gate", "no gate"])
    def test_weights_of_a_dense_models_products(self, config: ModelConfig) -> None:
        """All that a step reads are theirs, but norms: two of each layer and the last one."""
        *layer, head = (outputs * inputs for outputs, inputs in product_shapes(config))
        norms = (2 * config.num_layers + 1) * config.hidden_size
        assert config.num_layers * sum(layer) + head == weight_elements(config) - norms

    def test_rounds_of_a_way_to_draw(self) -> None:
        """Each is compared with the greedy steps of its own round."""
        rounds = {"seconds": [0.003, 0.005, 0.006], "greedy_seconds": [0.002, 0.004, 0.006]}
        figure = decode_figure(4, 512, 1_000_000, ceilings=CEILINGS, sampling="top-p", **rounds)
        assert (figure.step_ms, figure.least_ms, figure.most_ms) == pytest.approx((5.0, 3.0, 6.0))
        assert figure.beyond_greedy == pytest.approx(0.25) and figure.floor_share == pytest.approx(0.2)

    def test_a_prefill_against_the_product(self) -> None:
        figure = prefill_figure(500, 2 * 10**11, [0.25], CEILINGS)
        assert (figure.ms, figure.tokens_per_second, figure.gemm_share) == pytest.approx((250.0, 2000.0, 0.8))
        assert figure.beside_share == 0.0

    def test_a_prefill_against_products_of_its_rounds(self) -> None:
        rounds, rates = [0.25, 0.5, 0.4], [8e11, 5e11, 10e11]  # shares of 1, 0.8 and 0.5
        assert prefill_figure(500, 2 * 10**11, rounds, CEILINGS, rates).beside_share == pytest.approx(0.8)


class TestBusyShare:
    @pytest.mark.parametrize(
        ("spans", "share"),
        [
            ([], 0.0),
            ([(5.0, 9.0)], 1.0),
            ([(0.0, 2.0), (3.0, 4.0)], 0.75),
            ([(0.0, 3.0), (2.0, 4.0), (8.0, 10.0)], 0.6),  # the second begins in the first
            ([(0.0, 8.0), (1.0, 2.0), (9.0, 10.0)], 0.9),  # the second lies in the first
        ],
    )
    def test_union_over_the_whole_time(self, spans: list[tuple[float, float]], share: float) -> None:
        assert busy_share([(start, end, "kernel") for start, end in spans]) == pytest.approx(share)

    def test_time_of_each_kernel_per_step(self) -> None:
        spans = [(0.0, 4.0, "a"), (3.0, 6.0, "b"), (10.0, 14.0, "a"), (14.0, 16.0, "b")]
        assert by_kernel(spans, 2) == [
            {"kernel": "a", "us": 4.0, "after_us": 4.0, "calls": 1.0},
            {"kernel": "b", "us": 2.5, "after_us": 2.0, "calls": 1.0},
        ]


class TestCeilings:
    @pytest.fixture(autouse=True)
    def _a_quarter_second_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_timing, "_CPU_COPY_BYTES", 1 << 20)
        monkeypatch.setattr(device_timing, "seconds_per_call", self.time_call)

    def time_call(self, calls: Any, device: torch.device) -> float:
        for call in calls:
            call()
        return 0.25

    def test_a_copy_reads_and_writes(self) -> None:
        assert device_timing.copy_bandwidth(CPU) == 2 * (1 << 20) / 0.25

    def test_reads_alone(self) -> None:
        assert device_timing.read_bandwidth(CPU) == (1 << 20) / 0.25

    def test_the_fastest_way_to_read_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = iter([0.5, 0.125, 0.25])
        monkeypatch.setattr(device_timing, "seconds_per_call", lambda calls, device: next(seconds))
        assert device_timing.read_bandwidth(CPU) == (1 << 20) / 0.125

    def test_a_product_multiplies_and_adds(self) -> None:
        assert device_timing.gemm_rate(CPU, torch.float32) == 2 * 512**3 / 0.25

    def test_a_kernel_is_bound_by_the_slower_of_both(self) -> None:
        ceilings = KernelCeilings(copy_bytes_per_second=100.0, gemm_flops_per_second=1000.0)
        assert ceilings.floor(Case("op", "", 1, 200, 1000, lambda _: [])) == (2.0, "memory")
        assert ceilings.floor(Case("op", "", 1, 200, 3000, lambda _: [])) == (3.0, "compute")


def test_bytes_and_operations_of_kernels() -> None:
    target = Target(CONFIG, torch.float32, CPU, block_size=4, context=9)
    found = {
        (case.operation, case.name): (case.num_bytes, case.flops)
        for case in cases(target, 3, ["rms_norm", "pack_norm", "gelu_mul", "silu_mul", "pack_linear", "make_attention"])
    }
    assert found["rms_norm", "4"] == (2 * 3 * 4 * 4, 0)
    assert found["pack_norm", "4"] == (4 * 3 * 4 * 4, 0)
    assert found["silu_mul", "5"] == found["gelu_mul", "5"] == (3 * 3 * 5 * 4, 0)
    assert found["pack_linear", "norm 4->12"] == ((48 + 12 + 36) * 4, 2 * 3 * 48)
    assert found["pack_linear", "add 6->4"] == ((24 + 18 + 2 * 12) * 4, 2 * 3 * 24)
    assert found["pack_linear", "gated 4->10"] == ((40 + 12 + 15) * 4, 2 * 3 * 40)
    query = 3 * 2 * 3 * 4
    # Three sequences of nine tokens: keys and values of one head; two heads' products with both.
    assert found["make_attention", "decode, context 9"] == (2 * 27 * 3 * 4 + 2 * query, 4 * 2 * 3 * 27)
    assert found["make_attention", "prompt, context 3"] == (2 * 3 * 3 * 4 + 2 * query, 4 * 2 * 3 * 6)


def record(due: float, sent: float, *arrivals: float, error: str = "", output_tokens: int = 0) -> RequestRecord:
    return RequestRecord(
        due, sent, arrivals[-1] if arrivals else sent, list(arrivals), error=error,
        input_tokens=10, output_tokens=output_tokens or len(arrivals),
    )  # fmt: skip


class TestRequests:
    def test_times_of_one_request(self) -> None:
        one = record(1.0, 1.5, 2.0, 2.5, 2.75, 4.0)
        assert one.ttft_seconds == 0.5, "from when it was sent, not from when it was due"
        assert one.itl_seconds == [0.5, 0.25, 1.25]
        assert one.tpot_seconds == pytest.approx(2.0 / 3)
        assert record(0.0, 0.0, 1.0, 5.0, output_tokens=9).tpot_seconds == pytest.approx(0.5)

    def test_percentiles(self) -> None:
        figures = percentiles_ms([value / 1000 for value in range(101)])
        assert figures == pytest.approx(
            {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0, "count": 101}
        )
        assert percentiles_ms([0.002, 0.001]) == pytest.approx(
            {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99, "max": 2.0, "count": 2}
        ), "between two values, by their distance"

    def test_a_load(self) -> None:
        records = [
            record(0.0, 0.0, 0.25, 0.75, 1.0),
            record(1.0, 1.0, 2.0, 2.125, 4.0),
            record(2.0, 2.5, error="HTTP 503"),
        ]
        figures = summarise(records, Objective(ttft_ms=500))
        assert (figures["completed"], figures["duration_seconds"]) == (2, 4.0)
        assert (figures["ttft_ms"]["p50"], figures["ttft_ms"]["max"]) == pytest.approx((625.0, 1000.0))
        assert (figures["second_token_ms"]["p50"], figures["second_token_ms"]["max"]) == pytest.approx((312.5, 500.0))
        assert (figures["third_token_ms"]["p50"], figures["third_token_ms"]["max"]) == pytest.approx((1062.5, 1875.0))
        assert (figures["later_itl_ms"]["p50"], figures["later_itl_ms"]["max"]) == pytest.approx((1062.5, 1875.0))
        assert (figures["itl_ms"]["p50"], figures["itl_ms"]["mean"]) == pytest.approx((375.0, 687.5))
        assert (figures["e2e_ms"]["p50"], figures["dispatch_lag_ms"]["max"]) == pytest.approx((2000.0, 500.0))
        assert (figures["input_tokens_per_second"], figures["output_tokens_per_second"]) == pytest.approx((5.0, 1.5))
        assert (figures["slo_attainment"], figures["goodput_requests_per_second"]) == pytest.approx((1 / 3, 0.25))

    def test_gaps_before_the_second_and_the_third_token_are_those_of_tokens_not_of_chunks(self) -> None:
        """The first chunk of one has two tokens, the second chunk of the other; the last answer has one token."""
        both = record(0.0, 0.0, 1.0, 1.5, 3.5, output_tokens=4)
        both.chunk_tokens = [2, 1, 1]
        later = record(0.0, 0.0, 1.0, 1.25, 3.25, output_tokens=4)
        later.chunk_tokens = [1, 2, 1]
        alone = record(0.0, 0.0, 1.0)
        alone.chunk_tokens = [1]
        assert [[one.gap_before(token) for token in (2, 3, 4, 5)] for one in (both, later, alone)] == [
            [0.0, 0.5, 2.0, None], [0.25, 0.0, 2.0, None], [None] * 4
        ]  # fmt: skip
        figures = summarise([both, later, alone], None)
        assert (figures["second_token_ms"]["max"], figures["third_token_ms"]["max"]) == pytest.approx((250.0, 500.0))


DELAY_SECONDS = 0.4


async def completions(request: web.Request) -> web.StreamResponse:
    """Three tokens: the first after :data:`DELAY_SECONDS`, the second after as long again, the third at once."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for token, delay in enumerate((DELAY_SECONDS, DELAY_SECONDS, 0.0)):
        await asyncio.sleep(delay)
        choice = {"text": "x", "token_ids": [token], "finish_reason": "length" if token == 2 else None}
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def ask_both_clients() -> tuple[RequestRecord, Answer]:
    application = web.Application()
    application.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        [record] = await run_load(Endpoint(url), [{"model": "m", "prompt": [1], "max_tokens": 3}], [0.0])
        cluster = SimpleNamespace(url=url, spec=SimpleNamespace(served_model_name="m"))
        async with session() as http:
            return record, await complete(http, cluster, [1], 3)
    finally:
        await runner.cleanup()


def test_clients_measure_from_sending_to_arrival() -> None:
    """Real time can only make it more than the endpoint's own delays."""
    record, answer = asyncio.run(ask_both_clients())
    assert record.error == "" and answer.token_ids == [0, 1, 2]
    for ttft, gap in (
        (record.ttft_seconds, record.itl_seconds[0]),
        (answer.ttft_seconds, answer.arrivals[1] - answer.arrivals[0]),
    ):
        assert ttft >= 0.99 * DELAY_SECONDS
        assert ttft + gap >= 2 * 0.99 * DELAY_SECONDS
        assert ttft < 10 * DELAY_SECONDS, "this machine is very busy"


class TestSingleRequests:
    def test_latency_of_one_request(self) -> None:
        seconds = latency.seconds_of(record(0.0, 1.0, 1.5, 1.75, 2.75, 2.875, 3.0))
        assert seconds == {"ttft": 0.5, "second": 0.25, "third": 1.0, "step": 0.125}

    def test_latency_of_one_request_is_that_of_tokens_not_of_chunks(self) -> None:
        """A first chunk of two tokens: the hand-over is in the gap before the third one."""
        together = record(0.0, 1.0, 1.5, 2.5, 2.625, 2.75, output_tokens=5)
        together.chunk_tokens = [2, 1, 1, 1]
        seconds = latency.seconds_of(together)
        assert seconds == {"ttft": 0.5, "second": 0.0, "third": 1.0, "step": 0.125}
        with pytest.raises(SplitserveError, match="an answer has 2 tokens, where 12 were asked for"):
            latency.seconds_of(record(0.0, 1.0, 1.5, 2.5))

    def test_latency_pair_by_pair(self) -> None:
        def row(ttft: float, second: float, third: float, step: float) -> dict[str, float]:
            return {"ttft": ttft, "second": second, "third": third, "step": step}

        samples = {
            "mixed": [row(0.1, 0.004, 0.004, 0.004), row(0.2, 0.004, 0.003, 0.004), row(0.4, 0.005, 0.002, 0.004)],
            "1P1D": [row(0.2, 0.006, 0.009, 0.004), row(0.3, 0.008, 0.006, 0.005), row(0.4, 0.007, 0.008, 0.005)],
        }
        figures = latency.figures_of(1024, samples)
        assert figures.pop("ttft_ratios") == pytest.approx([1.0, 2.0])
        assert figures == pytest.approx(
            {
                "prompt_tokens": 1024,
                "mixed_ttft_ms": 200.0,
                "mixed_second_ms": 4.0,
                "mixed_third_ms": 3.0,
                "mixed_step_ms": 4.0,
                "1P1D_ttft_ms": 300.0,
                "1P1D_second_ms": 7.0,
                "1P1D_third_ms": 8.0,
                "1P1D_step_ms": 5.0,
                "ttft_ratio": 1.5,  # of 2, 1.5 and 1
                "second_beyond_step_ms": 2.0,  # of 2, 3 and 2
                "third_beyond_step_ms": 3.0,  # of 5, 1 and 3
            }
        )
        row_of_table = latency.row_of(figures | {"ttft_ratios": [1.0, 2.0]})
        assert dict(zip(latency.HEADERS, row_of_table, strict=True))["of pairs"] == "1.00 to 2.00"

    def test_reads_against_copies(self) -> None:
        figures = handover.read_figures(10**9, [0.004, 0.005, 0.002], [0.002, 0.002, 0.002], [0.001, 0.002, 0.001])
        assert figures == pytest.approx(
            {
                "handover_ms": 4.0,
                "handover_p99_ms": 5.0,
                "handover_gb_per_second": 250.0,
                "copy_gb_per_second": 500.0,
                "share_of_copy": 0.5,  # of 0.5, 0.4 and 1
                "lone_copy_gb_per_second": 1000.0,
                "share_of_lone_copy": 0.4,  # of 0.25, 0.4 and 0.5
            }
        )
        hundred = handover.read_figures(1, [0.001 * value for value in range(1, 101)], [1.0] * 100, [1.0] * 100)
        assert hundred["handover_p99_ms"] == pytest.approx(99.0)

    def test_whole_handovers(self) -> None:
        def route(latency_ms: float, exposed_ms: float, num_bytes: int, read_ms: float) -> dict[str, Any]:
            handover = {"transport": "t", "bytes": num_bytes, "reads": 2, "seconds": read_ms / 1e3}
            return {"handover_seconds": latency_ms / 1e3, "handover": handover | {"exposed_seconds": exposed_ms / 1e3}}

        routes = [route(3.0, 2.0, 4_000_000, 1.0), route(2.0, 1.0, 4_000_000, 2.0), route(9.0, 8.0, 4_000_000, 4.0)]
        figures = handover_served.figures_of(routes, prefill=0.1)
        assert figures["gb_per_second"] == pytest.approx(2.0) and figures["bytes"] == 4_000_000
        assert (figures["handover_p50_ms"], figures["handover_p99_ms"]) == pytest.approx((3.0, 9.0))
        assert (figures["exposed_p50_ms"], figures["exposed_p99_ms"]) == pytest.approx((2.0, 8.0))
        assert (figures["prefill_ms"], figures["exposed_share"]) == pytest.approx((100.0, 0.02))

    def test_paces_beside_loads(self) -> None:
        streams = [Answer(0.0, arrivals=[1.0, 1.5, 2.0, 3.0]), Answer(0.0, arrivals=[1.25, 2.25, 3.25])]
        spans = {"quiet": [(1.4, 1.6)], "resident": [(1.9, 2.1)], "loads": [(2.2, 2.3), (2.9, 3.3)]}
        figures = _paces(streams, spans)
        assert (figures["loads"], figures["streams"]) == (2, 2)
        assert [figures[f"{name}_itl_ms"] for name in spans] == pytest.approx([500.0, 500.0, 1000.0])
        assert figures["loads_over_quiet"] == figures["loads_over_resident"] == pytest.approx(2.0)
