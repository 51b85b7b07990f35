"""Near-ties as the chaos bench judges them: real answers pass, each other token is found, a tie is a tie."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serving import complete_all
from splitserve.benchmarks.chaos import ties as chaos_ties
from splitserve.benchmarks.chaos.chaos import check_answers
from splitserve.benchmarks.chaos.load import Answer, Case, Expected, make_cases
from splitserve.benchmarks.chaos.outcome import Outcome
from splitserve.benchmarks.chaos.ties import NEAR_TIE_SHARES, Referee
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def cases(tiny_qwen3: Path) -> list[Case]:
    """Greedy and sampled ones; every third may end at an end-of-sequence token."""
    found = make_cases(tiny_qwen3.name, 12, seed=0)
    return [replace(case, body={**case.body, "max_tokens": 24, "stream": False}) for case in found]


@pytest.fixture(scope="module")
def answers(tiny_qwen3: Path, cases: list[Case]) -> list[Answer]:
    """Return a worker's answers in float32."""
    engine = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", device="cpu", kv_memory_bytes=32 << 20, max_num_seqs=16, threads=1
    )
    bodies = [{name: value for name, value in case.body.items() if name != "stream_options"} for case in cases]
    with LocalCluster(simple_spec(engine, port=0, num_mixed=1), log_level="warning") as cluster:
        decoded = complete_all(cluster.url, bodies, at_once=False)
    return [answer_of(case, each) for case, each in zip(cases, decoded, strict=True)]


def answer_of(case: Case, decoded: dict[str, Any]) -> Answer:
    assert decoded["status"] == 200, decoded
    [choice], usage = decoded["choices"], decoded["usage"]
    return Answer(
        case.name, 0.0, text=choice["text"], token_ids=choice["token_ids"], finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def referee(tiny_qwen3: Path) -> Referee:
    return Referee(tiny_qwen3)


def changed(answer: Answer, index: int, token: int) -> Answer:
    return replace(answer, token_ids=[*answer.token_ids[:index], token, *answer.token_ids[index + 1 :]])


def test_what_a_worker_answers_passes(cases: list[Case], answers: list[Answer], referee: Referee) -> None:
    assert {case.body["temperature"] for case in cases} == {0, 0.9}
    assert [referee.problem(case.body, answer) for case, answer in zip(cases, answers, strict=True)] == [""] * 12


def test_any_other_token_is_found(cases: list[Case], answers: list[Answer], referee: Referee) -> None:
    for case, answer in zip(cases[:4], answers[:4], strict=True):
        for index in {0, 7, len(answer.token_ids) - 1}:
            other = (answer.token_ids[index] + 1) % 1500
            problem = referee.problem(case.body, changed(answer, index, other))
            assert problem.startswith(f"token {index} is {other} instead of {answer.token_ids[index]}, no near-tie"), (
                case.name
            )


def test_wrong_tokens_are_found_at_the_bound_of_bfloat16(
    cases: list[Case], answers: list[Answer], tiny_qwen3: Path
) -> None:
    """Answers are wrong from the middle on. A single wrong token is near enough in one case of a hundred."""
    lenient = Referee(tiny_qwen3, NEAR_TIE_SHARES["bfloat16"])
    for case, answer in zip(cases, answers, strict=True):
        middle = len(answer.token_ids) // 2
        wrong = [*answer.token_ids[:middle], *((token + 700) % 1500 for token in answer.token_ids[middle:])]
        assert "no near-tie" in lenient.problem(case.body, replace(answer, token_ids=wrong)), case.name


@pytest.mark.parametrize("number", [0, 3], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("share", "passes"), [(0.5, True), (4.0, False)])
def test_a_gap_decides(
    number: int, share: float, passes: bool, cases: list[Case], answers: list[Answer], tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The scores of two tokens lie apart by a share of the bound: by raising one until it's that far from winning."""
    case, answer, referee = cases[number], answers[number], Referee(tiny_qwen3)
    index, logits = 7, referee._logits(cases[number].body, answer.token_ids).clone()
    drawn, other = answer.token_ids[index], (answer.token_ids[index] + 1) % 1500

    def draws(raise_by: float) -> int:
        row = logits[index].clone()
        row[other] += raise_by
        return chaos_ties._draw(row[None], case.body, index)[0]

    low, high = 0.0, 100.0  # `drawn` wins at the one, `other` at the other
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if draws(middle) == other else (middle, high)
    assert draws(low) == drawn and draws(high) == other
    logits[index, other] += low - share * 2 * NEAR_TIE_SHARES["float32"] * float(logits[index].std())
    monkeypatch.setattr(Referee, "_logits", lambda *_: logits)
    changed_answer = changed(answer, index, other)
    assert (referee.problem(case.body, changed_answer) == "") is passes


def test_ends_are_judged(cases: list[Case], answers: list[Answer], referee: Referee) -> None:
    body, answer = cases[1].body, answers[1]
    assert body["ignore_eos"] and answer.finish_reason == "length"
    short = replace(answer, token_ids=answer.token_ids[:-2], completion_tokens=22)
    assert referee.problem(body, short) == "it ended 2 tokens early"
    assert "it ended after 22 tokens, where" in referee.problem(body, replace(short, finish_reason="stop"))
    assert "usage" in referee.problem(body, replace(answer, completion_tokens=23))
    assert referee.problem(body, replace(answer, error="HTTP 503")) == "failed: HTTP 503"


def test_on_a_cpu_no_difference_is_accepted(cases: list[Case], answers: list[Answer], referee: Referee) -> None:
    """A GPU's run accepts differences that the referee accepts, in the quiet run and in the storm."""
    tie, wrong = replace(answers[0], text="rounded"), changed(answers[1], 3, 5)
    expected = Expected(cases, {answer.case: answer for answer in answers}, [tie, wrong], [0.1])
    outcome = Outcome(expected, answers=[*answers, tie])
    check_answers(outcome, None)
    quiet, storm = (list(problems) for problems in list(outcome.checks.values())[:2])
    assert [text.partition(":")[0] for text in quiet] == [cases[0].name, cases[1].name]
    assert [text.partition(":")[0] for text in storm] == [cases[0].name] and not outcome.num_near_ties
    check_answers(outcome, referee)
    quiet, storm = (list(problems) for problems in list(outcome.checks.values())[:2])
    assert len(quiet) == 1 and "no near-tie" in quiet[0] and storm == [] and outcome.num_near_ties == 2


def test_rounding_of_float32_lies_within_the_bound(cases: list[Case], referee: Referee, tiny_qwen3: Path) -> None:
    import transformers

    body = cases[0].body
    rough = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = rough(torch.tensor([body["prompt"]])).logits[0, -1:].double()
    exact = referee._logits(body, [])
    error = float((logits - exact).abs().max() / exact.std())
    assert 0 < error < NEAR_TIE_SHARES["float32"] / 3
