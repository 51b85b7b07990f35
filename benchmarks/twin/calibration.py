"""Calibrations of the twin: from a running cluster, from a file, or a roofline of a named GPU."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.tiers.host import HOST
from splitserve.models.config import ModelConfig
from splitserve.models.expert_reads import expert_reads
from splitserve.models.roofline import (
    ATTAINED,
    CPU_THREAD,
    DEVICE_RATES,
    MAX_BANDWIDTH_THREADS,
    DeviceRates,
    estimate_steps,
)
from splitserve.orchestration.doctor.cluster import read_report
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.models import Calibration, CopyModel, LinkModel

CPU = "cpu"
MEASURED_STEPS = 200
"""Steps from which on a worker's fit counts as a measurement."""
GPU_LINK_BYTES_PER_SECOND = 250e9  # between two GPUs of one host, as hand-overs measure it
CPU_LINK_BYTES_PER_SECOND = 1.5e9
ITEM_BYTES = {CPU: 4}  # of weights and KV; on GPUs 2


def is_measured(model: StepModel) -> bool:
    """Return whether a worker has fitted a model to enough steps for others to be predicted by it."""
    return model.num_steps >= MEASURED_STEPS


def measures_each_role(report: ClusterReport) -> bool:
    """Return whether a worker of each of the cluster's roles has fitted a model to enough steps."""
    roles = {each.info.role for each in report.workers}
    return roles == {each.info.role for each in report.workers if is_measured(each.step_model)}


def of_cluster(report: ClusterReport, url: str) -> Calibration:
    """Return the models that a cluster's workers have fitted to their own steps.

    Of several workers with a role, the one with the most steps counts; of links, the median. Raises
    :class:`ConfigError` where no worker has fitted a model to enough steps yet.
    """
    steps, errors = {}, {}
    for role in Role:
        fitted = [each for each in report.workers if each.info.role is role and is_measured(each.step_model)]
        if fitted:
            best = max(fitted, key=lambda worker: worker.step_model.num_steps)
            steps[role], errors[role] = best.step_model, best.load.step_error
    if not steps:
        raise ConfigError(
            f"the workers of {url} have fitted no step times yet to {MEASURED_STEPS} steps or more: send it some load"
        )
    return Calibration(
        steps=steps,
        errors=errors,
        link=_link(report.workers),
        copies=_copies(report.workers),
        host_kv_bytes=max(
            (each.info.setup.host_kv_bytes * each.info.layout.tensor_parallel_size for each in report.workers),
            default=0,
        ),
        num_ranks=_num_ranks(report),
        source=f"fitted by the workers of {url}",
        is_measured=True,
    )


def of_roofline(config: ModelConfig, gpu: str, num_ranks: int = 1, num_threads: int = 1) -> Calibration:
    """Return the estimate for a GPU's name, or for "cpu" with ``num_threads``. Raises :class:`ConfigError`."""
    if gpu == CPU:
        bandwidth = min(num_threads, MAX_BANDWIDTH_THREADS) * CPU_THREAD.bytes_per_second
        rates = DeviceRates(num_threads * CPU_THREAD.flops_per_second, bandwidth, CPU_THREAD.overhead_seconds)
    elif gpu in DEVICE_RATES:
        rates = DEVICE_RATES[gpu]
    else:
        raise ConfigError(f"--gpu {gpu!r}: must be one of {', '.join([*DEVICE_RATES, CPU])}")
    itemsize = ITEM_BYTES.get(gpu, 2)
    rate = CPU_LINK_BYTES_PER_SECOND if gpu == CPU else GPU_LINK_BYTES_PER_SECOND
    return Calibration(
        steps={role: estimate_steps(config, rates, itemsize, num_ranks, role) for role in Role},
        link=LinkModel(bytes_per_second=rate),
        expert_reads=expert_reads(config, itemsize, ATTAINED * rates.bytes_per_second * num_ranks),
        source=f"roofline of {gpu}, uncalibrated",
    )


def read_calibration(path: str) -> Calibration:
    """Read the file that ``splitserve calibrate`` wrote. Raises :class:`ConfigError`."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--calibration {path}: {error}; make one with `splitserve calibrate`") from error
    if not found.steps:
        raise ConfigError(f"--calibration {path}: it has no step times; make one with `splitserve calibrate`")
    return found


def report_of(url: str, api_key: str) -> ClusterReport:
    """Read a running cluster's report. Raises :class:`SplitserveError` if it can't."""
    return read_report(Endpoint(url, api_key))


def model_row(role: str, model: StepModel, error: float | None) -> list[object]:
    """Return a line of the table of models: milliseconds per step, microseconds per unit of work."""
    return [
        role,
        model.num_steps,
        f"{1e3 * model.base:.3f}",
        f"{1e6 * model.per_decode:.2f}",
        f"{1e6 * model.per_context:.4f}",
        f"{1e6 * model.per_token:.2f}",
        f"{1e6 * model.per_pair:.5f}",
        "-" if error is None else f"{100 * error:.1f}%",
    ]


MODEL_HEADERS = ("role", "steps", "step, ms", "+ us/decode", "us/context token", "us/prompt token", "us/pair", "error")


def _copies(workers: Sequence[WorkerReport]) -> CopyModel:
    """Return the model of a rank's copies to and from its host tier: bytes over seconds, of all that were loaded."""
    num_bytes, seconds = 0.0, 0.0
    for worker in workers:
        for tier in worker.load.tiers:
            if tier.name == HOST and tier.load_seconds > 0:
                num_bytes += tier.loaded_bytes / worker.info.layout.tensor_parallel_size
                seconds += tier.load_seconds
    return CopyModel(copy_seconds=0.0, bytes_per_second=num_bytes / seconds) if num_bytes else CopyModel()


def _num_ranks(report: ClusterReport) -> int:
    """Return the ranks of each worker; 0 where workers differ."""
    found = {each.info.layout.tensor_parallel_size for each in report.workers}
    return found.pop() if len(found) == 1 else 0


def _link(workers: Sequence[WorkerReport]) -> LinkModel:
    rates = [link.bytes_per_second for worker in workers for link in worker.links if link.bytes_per_second > 0]
    return LinkModel(bytes_per_second=statistics.median(rates)) if rates else LinkModel()
