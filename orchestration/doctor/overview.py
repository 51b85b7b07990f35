"""The overview of a running cluster, read from its router, and its diagnosis as a check."""

from http import HTTPStatus

from splitserve.common.errors import ConfigError
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.doctor.report import Check, Problem, check
from splitserve.protocol.reports.overview import Overview


def read_overview(endpoint: Endpoint) -> Overview:
    """Read the overview. Raises :class:`ConfigError` if the endpoint isn't Splitserve's, or has another version."""
    answer = endpoint.get("/admin/overview")
    if answer.status != HTTPStatus.OK:
        raise ConfigError(
            f"{endpoint.url} answered {answer.status} to GET /admin/overview: is it a router of this version?"
        )
    return endpoint.decoded(answer, Overview)


def check_bottleneck(view: Overview) -> Check:
    """Return the router's diagnosis as a check: each finding is a problem, the most severe first."""
    diagnosis = view.diagnosis
    problems = [
        Problem(
            finding.name,
            " ".join([finding.sentence, *(f"{reason};" for reason in finding.reasons)]).rstrip(";"),
            finding.remedy,
        )
        for finding in diagnosis.findings
    ]
    return check("bottleneck", diagnosis.sentence, problems)
