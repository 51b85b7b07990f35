"""Files with which a simulated comparison can be repeated: the cluster specs, and the requests as a trace."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from splitserve.benchmarks.goodput.arms import Arm
from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, ObjectivesSpec, RouterSpec
from splitserve.orchestration.spec.document import to_yaml
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.workloads.conversation import Workload
from splitserve.workloads.traces import TraceLine

WORKLOAD_FILE = "workload.jsonl"


def spec_of(arm: Arm, engine: EngineConfig, ttft_ms: float, tpot_ms: float) -> ClusterSpec:
    """Return the cluster spec of an arrangement with these objectives; 0: none."""
    return simple_spec(
        arm.engine(engine),
        num_prefill=arm.num_prefill,
        num_decode=arm.num_decode,
        num_mixed=arm.num_mixed,
        router=RouterSpec(policy=arm.policy),
        objectives=ObjectivesSpec(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
    )


def export(folder: Path, specs: Mapping[str, ClusterSpec], workload: Workload) -> float:
    """Write a spec for each cluster, and the workload; return the rate at which ``trace:FILE`` gives the same arrivals.

    Raises :class:`ConfigError` for a workload that a trace can't hold, or if a file can't be written.
    """
    lines = list(_lines(workload))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            (folder / f"{name.replace(':', '-').replace('@', '-chunks-')}.yaml").write_text(to_yaml(spec))
        (folder / WORKLOAD_FILE).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"--export {folder}: {error.strerror}") from error
    seconds = (lines[-1].timestamp - lines[0].timestamp) / 1e3
    return len(lines) / seconds if seconds else float(len(lines))


def _lines(workload: Workload) -> Iterator[TraceLine]:
    for conversation in workload.conversations:
        if len(conversation.turns) > 1 or len(conversation.turns[0].pieces) > 1:
            raise ConfigError(
                f"--export: {workload.name} has conversations or shared prefixes, which lengths alone don't describe; "
                "export one of INPUT/OUTPUT"
            )
        [turn] = conversation.turns
        yield TraceLine(1e3 * conversation.start_seconds, turn.num_new_tokens, turn.num_output_tokens)
