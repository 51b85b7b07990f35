"""Measured loads for tests of the twin's benchmark. Not a test module."""

from splitserve.benchmarks.twin.cases import Case, Measured


def measured(case: Case, throughput: float) -> Measured:
    """Return a load that was asked for at 13 requests per second."""
    return Measured(
        case=case,
        repeat=0,
        rate=13.0,
        offered_rate=13.0,
        num_requests=100,
        seed=0,
        figures={"requests_per_second": throughput},
        stages={},
        usual_stages={},
        reads=[],
        router_ttft=0.0,
        workers=[],
        step_totals={},
        step_errors={},
        link_bytes_per_second=0.0,
        num_cpus=1,
    )
