"""The model runner on a CUDA device: steps are launched, and waited for later.

Everything runs in one stream. A step's inputs are copied to the device from pinned memory in one copy, and its drawn
tokens come back in another; the host waits for nothing else. A step may be launched while the step before it still
runs: a token that the earlier step has yet to draw is looked up on the device (:attr:`ScheduledChunk.previous_chunk`).

Steps of decode tokens alone replay a CUDA graph of the next larger size of :func:`.graph_sizes.batch_sizes`. The
padding rows repeat the last sequence: they compute and write the same values once more, so kernels need no special case
for them. Steps with a small prefill, beside decode tokens or alone, may have graphs as well
(:func:`.graph_sizes.mixed_sizes`): launched kernel by kernel, such a step takes the host longer than the device. For
longer prefills that depends on the model and on the number of ranks, and is measured
(:func:`.graph_sizes.least_tokens`). A size may have several graphs, whose attention has different forms: the first that
suits a step serves it, and if none does, it is launched (:meth:`splitserve.kernels.api.MixedPlan.suits`). The padding
rows at the end of a mixed step write nothing.

A step may wait on the device for copies into the blocks that it reads (:attr:`ScheduledChunk.gates`), one group of
layers at a time. Graphs of prefill alone are cut at these groups, and replayed one after the other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.windows import FixedLayerPlans, LayerPlans, MixedLayerPlans
from splitserve.models.decoder import ForwardBatch, RunnableModel
from splitserve.models.layers.step import BeforeLayer
from splitserve.models.runner.graph_sizes import MAX_MIXED_CHUNKS, MixedSize, batch_sizes, least_tokens
from splitserve.models.runner.graphs import DecodeGraph, MixedGraph
from splitserve.models.runner.inputs import StepInputs, num_leading_decodes
from splitserve.models.runner.launched import Gates, LaunchedForward, PendingStep, StepBefore
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.sampling.logprobs import PromptRows
from splitserve.protocol.step import ChunkTable, LaunchingRunner, SampleSpec, ScheduledChunk, StepOutput, StepPlan

_WARM_UP_RUNS = 2
_GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)


class CudaRunner(ModelRunner):
    """A :class:`ModelRunner` with ``launch``. Call :meth:`capture` once before the first step, unless graphs are off.

    ``gates``: the events of copies that steps may have to wait for; None if there are none.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: Tensor | Sequence[Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        gates: Gates | None = None,
        model_dir: Path | None = None,
    ) -> None:
        super().__init__(model, kv_cache, model_dir=model_dir)
        self._gates = gates
        self._max_num_seqs = max_num_seqs
        self._max_blocks = -(-max_model_len // self.block_size)
        self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(model.device))
        self._drawn = torch.zeros(2 * max_num_seqs, dtype=torch.int64, device=model.device)  # of the last launched step
        self._inputs = StepInputs(self.cache)
        self._before = StepBefore(None, {})  # that step
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, DecodeGraph] = {}
        self._mixed_graphs: dict[MixedSize, list[MixedGraph]] = {}  # the first that suits a step serves it
        self._last_replay: tuple[Tensor, FixedLayerPlans, Sequence[ScheduledChunk], int] | None = None

    @property
    def launcher(self) -> LaunchingRunner | None:
        """See :meth:`ModelRunner.launcher`."""
        return self

    @property
    def depends_on_sizes(self) -> bool:
        """See :meth:`ModelRunner.depends_on_sizes`."""
        return True

    def check_device(self) -> None:
        """Raise an error if the device can run no further step."""
        torch.cuda.synchronize(self.model.device)

    def run(self, plan: StepPlan) -> StepOutput:
        """See :meth:`ModelRunner.run`."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue the step behind those launched before, and return at once. A step that waits for copies on the device
        returns when these are queued, too; one with grammars waits for the tokens of the step before, and makes its
        masks while the device computes its logits."""
        return self._launch_forward(plan).launch_draws()

    def launch_forward(self, plan: StepPlan) -> LaunchedForward | None:
        """See :class:`splitserve.protocol.step.TwoPartRunner`: for replays of decodes without sampling features."""
        is_plain = not plan.released and all(_is_plain(chunk) for chunk in plan.chunks)
        return self._launch_forward(plan) if is_plain and self._graph_size(plan.chunks) is not None else None

    @torch.inference_mode()
    def rehearse(self) -> None:
        """See :class:`splitserve.protocol.step.TwoPartRunner`: fills the inputs of the last replay once more, in the
        stream's order. Each replay fills its own."""
        if self._last_replay is not None:
            with torch.cuda.stream(self._stream):
                self._inputs.fill(*self._last_replay)

    @torch.inference_mode()
    def _launch_forward(self, plan: StepPlan) -> LaunchedForward:
        before, self._before = self._before, StepBefore(None, {})
        with torch.cuda.stream(self._stream):
            self.sampler.prepare(plan)
            self.cache.copy_blocks(plan.chunks)
            prompts = self._prompts(plan)
            logits = self._logits(plan.chunks, prompts)
        return LaunchedForward(self._launch_draws, plan, before, prompts, logits, time.monotonic())

    @torch.inference_mode()
    def _launch_draws(self, forward: LaunchedForward) -> PendingStep:
        plan, logits = forward.plan, forward.logits
        sampled = tuple(index for index, chunk in enumerate(plan.chunks) if chunk.sample is not None)
        with torch.cuda.stream(self._stream):
            drawn = None
            if logits is not None:
                drawn = self.sampler.draw(logits, plan.chunks, forward.before.tokens)
                self._drawn[: len(sampled)].copy_(drawn[: len(sampled)])
            numbers, scores = self._results(drawn, forward.prompts)
            host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        errors = {} if logits is None else self.sampler.errors
        pending = PendingStep(plan, host, scores, done, errors, forward.queued_at)
        self._inputs.row_of_chunk = {chunk: row for row, chunk in enumerate(sampled)}
        self._before = StepBefore(pending, self._inputs.row_of_chunk)
        return pending

    def _logits(self, chunks: Sequence[ScheduledChunk], prompts: PromptRows | None) -> Tensor | None:
        """Return float logits [R, vocab] of the chunks that draw, or None if there are none. Graphs score no prompt."""
        gates = [copy_id for chunk in chunks for copy_id in chunk.gates]
        if prompts is not None:
            return self._eager(chunks, gates, prompts)
        if (size := self._graph_size(chunks)) is not None:
            for layer in self._first_layers:
                self._wait_for_copies(gates, layer)
            return self._replay(chunks, size)
        if (mixed := self._mixed_graph(chunks)) is not None:
            return self._replay_mixed(mixed, chunks, gates)
        return self._eager(chunks, gates)

    # ---- waiting for copies ----

    @property
    def _first_layers(self) -> Sequence[int]:
        """The first layer of each group of layers that is copied as a whole; [0] without gates."""
        return self._gates.first_layers if self._gates is not None else [0]

    def _wait_for_copies(self, gates: Sequence[int], first_layer: int) -> None:
        """Make the stream wait for the copies ``gates`` of the group of layers that begins at ``first_layer``."""
        for copy_id in gates:
            assert self._gates is not None, "a step has gates, but the runner was made without LoadGates"
            event = self._gates.event(copy_id, first_layer)
            if event is not None:
                self._stream.wait_event(event)

    def _waiting(self, gates: Sequence[int]) -> BeforeLayer | None:
        """Return the function that an eager step calls before each layer; None if it waits for no copies."""
        if not gates:
            return None

        def wait(layer: int) -> None:
            if layer in self._first_layers:
                self._wait_for_copies(gates, layer)

        return wait

    # ---- eager ----

    def _eager(
        self, chunks: Sequence[ScheduledChunk], gates: Sequence[int], prompts: PromptRows | None = None
    ) -> Tensor | None:
        """Run a step of any size, kernel by kernel."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        flat = np.empty((self._inputs.num_rows, num_tokens), dtype=np.int64)
        rows = self._inputs.flatten(chunks, flat)
        if prompts is not None:
            rows = np.concatenate((rows, np.array(prompts.rows, dtype=np.int64)))
        packed = torch.from_numpy(np.concatenate((flat.ravel(), rows))).pin_memory()
        on_device = packed.to(self.model.device, non_blocking=True)
        inputs = on_device[: flat.size].view(flat.shape)
        plan = self.cache.attention.plan(self.cache.batches(chunks))
        batch = self._forward_batch(inputs, on_device[flat.size :], plan)
        batch = replace(batch, scored=prompts)
        return self._forward(batch, self._waiting(gates))

    def _forward_batch(self, inputs: Tensor, rows: Tensor | None, plan: LayerPlans | FixedLayerPlans) -> ForwardBatch:
        """Return the model's inputs. ``inputs`` [3 + N, T] are on the device, as in :class:`DecodeGraph`."""
        return ForwardBatch(self.model.begin_step(inputs, self._drawn, self.cache.shapes), rows, plan)

    # ---- graphs ----

    def _graph_size(self, chunks: Sequence[ScheduledChunk]) -> int | None:
        """Return the captured size that serves these chunks, or None."""
        if any(len(chunk.token_ids) != 1 or chunk.sample is None for chunk in chunks):
            return None
        return min((size for size in self._graphs if size >= len(chunks)), default=None)

    def _replay(self, chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        graph = self._graphs[size]
        self._inputs.fill(graph.inputs, graph.plan, chunks, size)
        self._last_replay = graph.inputs, graph.plan, chunks, size  # which could be filled: so can a rehearsal
        graph.graph.replay()
        return graph.logits[: len(chunks)]

    def _mixed_graph(self, chunks: Sequence[ScheduledChunk]) -> MixedGraph | None:
        """Return the graph that serves these chunks, or None."""
        if not self._mixed_graphs:
            return None
        num_decodes = num_leading_decodes(chunks)
        longer = chunks[num_decodes:]
        if not 0 < len(longer) <= MAX_MIXED_CHUNKS:
            return None
        num_tokens = sum(len(chunk.token_ids) for chunk in longer)
        fitting = (
            size
            for size in self._mixed_graphs
            if size.num_decodes >= num_decodes
            and size.num_tokens >= num_tokens
            and (num_decodes or not size.num_decodes)
        )
        if (size := min(fitting, key=sum, default=None)) is None:
            return None
        batches = self.cache.batches(chunks)
        graph = next((graph for graph in self._mixed_graphs[size] if graph.plan.suits(batches)), None)
        return graph if graph is not None and num_tokens >= graph.least_tokens else None

    def _replay_mixed(self, graph: MixedGraph, chunks: Sequence[ScheduledChunk], gates: Sequence[int]) -> Tensor:
        self._inputs.fill_mixed(graph.inputs, graph.plan, chunks, graph.size)
        for first_layer, part in graph.parts.items():
            self._wait_for_copies(gates, first_layer)
            part.replay()
        return graph.logits[: sum(chunk.sample is not None for chunk in chunks)]

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> float:
        """Capture the graphs of decode steps, largest first, so that the others share its memory. Returns the seconds
        taken. Capturing overwrites the first block of the KV memory."""
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):
            for size in sorted(sizes or batch_sizes(self._max_num_seqs), reverse=True):
                self._graphs[size] = self._capture_size(size)
        self._stream.synchronize()
        return time.perf_counter() - started

    @torch.inference_mode()
    def capture_mixed(self, sizes: Sequence[MixedSize], lowest: Callable[[int], int] = int) -> float:
        """Capture graphs of steps with prefill, as :meth:`capture` does, and measure when to use them.

        ``lowest`` returns the lowest number of all ranks (:meth:`.Collectives.lowest`), since these have to launch the
        same steps. Raises NotImplementedError if the attention backend has no plan for such steps.
        """
        started = time.perf_counter()
        num_rows = max(size.num_decodes for size in sizes) + MAX_MIXED_CHUNKS
        logits = torch.empty((num_rows, self.model.config.vocab_size), dtype=self.model.dtype, device=self.model.device)
        with torch.cuda.stream(self._stream):
            for size in sorted(sizes, key=sum, reverse=True):
                plans = self.cache.attention.make_mixed_plans(*size, MAX_MIXED_CHUNKS, self._max_blocks)
                graphs = [self._capture_mixed_size(size, plan, logits) for plan in plans]
                self._mixed_graphs[size] = graphs
                if size.is_long:  # the last form is the one for prompts with nothing before them
                    least = lowest(self._measured_least_tokens(graphs[-1]))
                    for graph in graphs:
                        graph.least_tokens = least
        self._stream.synchronize()
        return time.perf_counter() - started

    def _capture_size(self, size: int) -> DecodeGraph:
        chunks = [self._trial(1)] * size
        inputs = torch.zeros((self._inputs.num_rows, size), dtype=torch.int64, device=self.model.device)
        plan = self.cache.attention.make_decode_plan(size, self._max_blocks)
        for _ in range(_WARM_UP_RUNS if not self._graphs else 1):  # compiles kernels, sets libraries up
            self._inputs.fill(inputs, plan, chunks, size)
            self._forward(self._forward_batch(inputs, None, plan))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = self._forward(self._forward_batch(inputs, None, plan))
        assert logits is not None
        return DecodeGraph(graph, inputs, plan, logits)

    def _capture_mixed_size(self, size: MixedSize, plan: MixedLayerPlans, logits: Tensor) -> MixedGraph:
        num_tokens, num_rows = sum(size), size.num_decodes + MAX_MIXED_CHUNKS
        chunks = [*[self._trial(1)] * size.num_decodes, self._trial(size.num_tokens)]
        num_numbers = self._inputs.num_rows * num_tokens
        inputs = torch.zeros(num_numbers + num_rows, dtype=torch.int64, device=self.model.device)
        logits = logits[:num_rows]

        def run(before_layer: BeforeLayer | None = None) -> None:
            tokens = inputs[:num_numbers].view(self._inputs.num_rows, num_tokens)
            batch = self._forward_batch(tokens, inputs[num_numbers:], plan)
            result = self._forward(batch, before_layer)
            assert result is not None
            logits.copy_(result)

        self._inputs.fill_mixed(inputs, plan, chunks, size)
        run()
        parts = self._capture_parts(run, self._first_layers if size.num_decodes == 0 else [0])
        return MixedGraph(size, parts, inputs, plan, logits)

    def _measured_least_tokens(self, graph: MixedGraph) -> int:
        """Return :func:`least_tokens` of a graph of prefill alone."""
        num_tokens = graph.size.num_tokens
        chunks = [self._trial(num_tokens)]
        seconds: list[float] = []
        for run in (self._eager, lambda chunks, gates: self._replay_mixed(graph, chunks, gates)):
            for _ in range(2):  # the first time sets up
                self._stream.synchronize()
                started = time.perf_counter()
                run(chunks, ())
                launched = time.perf_counter()
                self._stream.synchronize()
            seconds += [launched - started, time.perf_counter() - started]
        return least_tokens(num_tokens, seconds[0], seconds[1], seconds[3])

    def _trial(self, num_tokens: int) -> ScheduledChunk:
        """Return a chunk to capture a graph with: the first block of each group, over and over."""
        blocks = [0] * -(-num_tokens // self.block_size)
        others = (ChunkTable(0, blocks),) * (self.cache.num_groups - 1)
        return ScheduledChunk([0] * num_tokens, 0, blocks, _GREEDY, other_tables=others)

    def _capture_parts(
        self, run: Callable[[BeforeLayer], None], first_layers: Sequence[int]
    ) -> dict[int, torch.cuda.CUDAGraph]:
        """Capture ``run`` as one graph for each of ``first_layers``; the first graph includes the work before all
        layers. ``run`` still holds the tensors that outlive a part, so no other part takes their memory."""
        parts: dict[int, torch.cuda.CUDAGraph] = {}

        def begin(layer: int) -> None:
            parts[layer] = torch.cuda.CUDAGraph()
            parts[layer].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def before_layer(layer: int) -> None:
            if layer in first_layers[1:]:
                end()
                begin(layer)

        def end() -> None:
            next(reversed(parts.values())).capture_end()

        torch.cuda.synchronize(self.model.device)
        torch.cuda.empty_cache()
        begin(first_layers[0])
        try:
            run(before_layer)
        finally:
            end()
        return parts


def _is_plain(chunk: ScheduledChunk) -> bool:
    """Return whether nothing but a forward pass is to be queued before the draws of ``chunk``."""
    has_features = chunk.sample is not None and chunk.sample.features is not None
    return not (has_features or chunk.others or chunk.gates or chunk.copies or chunk.scored)
