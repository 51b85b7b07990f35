"""Answers of a router against its OpenAPI document, with requests that schemathesis makes of it. Not a test module."""

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, openapi
from schemathesis import checks as api_checks

from waiting import PATIENCE_SECONDS

api_checks.load_all_checks()
TRUTHS = [
    api_checks.CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
]


def check_answers(url: str, mode: str, *, count: int, first: int) -> None:
    """Send ``count`` requests from the seed ``first``, sound ones ("positive") or not ("negative"), and check each
    answer."""

    @seed(first)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=_cases(url, GenerationMode(mode)))
    def check(case: Case) -> None:
        case.call_and_validate(base_url=url, checks=TRUTHS, timeout=PATIENCE_SECONDS)

    check()


def _cases(url: str, mode: GenerationMode) -> st.SearchStrategy[Case]:
    document = openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    chosen = posts if mode is GenerationMode.NEGATIVE else [*posts, *operations]
    return st.one_of([operation.as_strategy(generation_mode=mode) for operation in chosen])
