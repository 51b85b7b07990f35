"""A `paced` device: a worker on CPU whose steps take the times of a model instead of being computed.

Process, engine loop, scheduler, memory, hand-overs and messages are the real ones, so that clusters larger than a
machine's cores can be compared with their twin. The step-time model comes in :data:`STEPS_VARIABLE`, as JSON.
"""

import os
import tempfile
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import msgspec
import torch

from splitserve.benchmarks.engine.paced_runner import PacedRunner
from splitserve.benchmarks.twin.calibration import of_roofline
from splitserve.common.errors import ConfigError
from splitserve.kvconnector.transfer.owner_thread import wait_precisely
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import write_demo_config
from splitserve.models.parallel.ranks import Collectives
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.protocol.step import StepOutput, StepPlan
from splitserve.worker.entry import run_worker
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.served_model import Progress, ServedModel, load_served_model

ENTRY = "splitserve.benchmarks.twin.paced:run_paced_worker"
STEPS_VARIABLE = "SPLITSERVE_PACED_STEPS"
OUTPUT_TOKEN = 11
SHAPE = "llama-3.1-8b"


def roofline_steps(gpu: str) -> StepModel:
    """Return the step times of :data:`SHAPE` on a device of ``DEVICE_RATES``, by a roofline."""
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder:
        config = load_model_config(write_demo_config(Path(folder) / SHAPE, shape=SHAPE))
    return of_roofline(config, gpu).steps[Role.MIXED]


class PacedModel(ModelRunner):
    """Runner of a served model whose device is a timer; each step draws :data:`OUTPUT_TOKEN`, and writes no KV."""

    def __init__(self, served: ServedModel, steps: StepModel) -> None:
        super().__init__(served.runner.model, served.memory.kernel_views)
        self._device = PacedRunner(steps, served.vocab_size, tokens=repeat(OUTPUT_TOKEN))
        self._is_precise = False

    def run(self, plan: StepPlan) -> StepOutput:
        """Wait for as long as the step takes by the model."""
        pending = self._device.launch(plan)
        if not self._is_precise:  # of the thread that runs steps
            wait_precisely()
            self._is_precise = True
        return pending.wait()


def run_paced_worker(config: WorkerConfig, progress: Progress) -> None:
    """Serve like :func:`run_worker`, with paced steps. Raises :class:`ConfigError` without their model."""
    try:
        steps = msgspec.json.decode(os.environ.get(STEPS_VARIABLE, ""), type=StepModel)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{STEPS_VARIABLE} must hold a step-time model as JSON: {error}") from error

    def load(
        engine: EngineConfig,
        device: torch.device,
        group: Collectives,
        report: Progress,
        clock: StartClock | None = None,
    ) -> ServedModel:
        served = load_served_model(engine, device, group, report, clock)
        return replace(served, runner=PacedModel(served, steps))

    run_worker(config, progress, load)
