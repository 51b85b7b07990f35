"""Estimate of a step-time model from the rates of a device and the least costs of a model, until steps were seen."""

from dataclasses import dataclass

import torch

from splitserve.models.config import ModelConfig
from splitserve.models.expert_reads import ExpertLine, expert_reads
from splitserve.models.step_costs import decode_bytes, head_flops, pair_flops, token_flops
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role

ATTAINED = 0.7
"""Share of a device's rates that steps usually attain."""
SAVED_BESIDE = 0.12
"""Share of a prompt token's time that it saves in a step that decodes: 17.3 µs of an H100 for 80 to 576 tokens of an 8B
model, where a worker with the same steps fits 19.9 to prompts of 2,048 alone."""

USUAL_CONTEXT = 4096
"""Tokens of a sequence at which the estimate of its KV is exact: a longer one reads less per token where layers have
windows."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a device. ``overhead_seconds``: of a step, whatever it computes."""

    flops_per_second: float
    bytes_per_second: float
    overhead_seconds: float


DEVICE_RATES = {  # dense bf16, by the manufacturer's figures
    "B200": DeviceRates(2250e12, 8.0e12, 5e-4),
    "H200": DeviceRates(989e12, 4.8e12, 5e-4),
    "H100": DeviceRates(989e12, 3.35e12, 5e-4),
    "A100": DeviceRates(312e12, 2.0e12, 5e-4),
    "L40S": DeviceRates(362e12, 0.86e12, 5e-4),
}
OTHER_GPU = DeviceRates(150e12, 1.0e12, 5e-4)
CPU_THREAD = DeviceRates(4e10, 8e9, 1e-3)  # one core, float32
MAX_BANDWIDTH_THREADS = 8  # that fill a host's memory bus


def device_rates(device: torch.device, num_threads: int) -> DeviceRates:
    """Return the rates of a GPU, by its name, or of ``num_threads`` cores."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((rates for known, rates in DEVICE_RATES.items() if known in name), OTHER_GPU)
    threads = max(1, num_threads)
    return DeviceRates(
        threads * CPU_THREAD.flops_per_second,
        min(threads, MAX_BANDWIDTH_THREADS) * CPU_THREAD.bytes_per_second,
        CPU_THREAD.overhead_seconds,
    )


def estimate_steps(
    config: ModelConfig, rates: DeviceRates, itemsize: int, num_ranks: int = 1, role: Role = Role.MIXED
) -> StepModel:
    """Return the step-time model of ``num_ranks`` devices of these rates. ``itemsize``: of weights and KV, in bytes.

    A step reads the weights once; prompts compute, decoding sequences read their KV. Of experts, a batch reads those
    that it hits, a curve (:class:`ExpertReads`) that becomes a straight line here, another one for each ``role``. The
    curve is near enough to it that the router, which holds a fit near its estimate, can follow fits of few sequences.
    """
    flops = ATTAINED * rates.flops_per_second * num_ranks
    bandwidth = ATTAINED * rates.bytes_per_second * num_ranks
    per_token = token_flops(config) / flops
    reads = expert_reads(config, itemsize, bandwidth)
    line = ExpertLine() if reads is None else reads.line(role)
    weights = decode_bytes(config, 0, 0, itemsize, line.base)
    more_weights = decode_bytes(config, 0, 0, itemsize, line.base + line.per_decode) - weights
    kv = decode_bytes(config, 1, USUAL_CONTEXT, itemsize, line.base) - weights
    return StepModel(
        base=rates.overhead_seconds + weights / bandwidth,
        per_decode=(token_flops(config) + head_flops(config)) / flops + more_weights / bandwidth,
        per_context=kv / USUAL_CONTEXT / bandwidth,
        per_token=per_token,
        per_pair=pair_flops(config) / flops,
        saved_beside=SAVED_BESIDE * per_token,
    )
