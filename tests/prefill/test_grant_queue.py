"""Prompts without a grant: which are asked for, in which order, how often, and whom a full decode worker holds up."""

import pytest

from scheduled_sequences import make_sequence
from splitserve.engine.sequence import Sequence
from splitserve.prefill.grant_queue import GrantQueue
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.request import Party

D0, D1 = Party("decode-0", 1), Party("decode-1", 1)
PROTOCOL = ProtocolConfig()
STEP_TOKENS = 100


class Queue:
    """A queue with prompts by their names, at a time that the test moves on."""

    def __init__(self) -> None:
        self.queue = GrantQueue(PROTOCOL, STEP_TOKENS)
        self.sequences: dict[str, Sequence] = {}
        self.now = 0.0

    def add(self, names: str, peer: Party = D0, num_tokens: int = 150, *, is_asked: bool = False) -> None:
        for name in names:
            sequence = self.sequences[name] = make_sequence(name, num_tokens)
            sequence.number = len(self.sequences)
            self.queue.add(sequence, peer, self.now, is_asked=is_asked)

    def choose(self, waiting: str = "", num_tokens: int = 0) -> str:
        granted = [self.sequences[name] for name in waiting]
        chosen = self.queue.choose(granted, num_tokens, self.now)
        self.queue.check_invariants()
        return "".join(prompt.sequence.key.request_id for prompt in chosen)

    def grant(self, names: str) -> None:
        for name in names:
            assert self.queue.pop(self.sequences[name].key) is not None

    def delay(self, names: str, peer: Party = D0) -> None:
        for name in names:
            self.queue.on_delayed(self.sequences[name].key, peer, self.now)


@pytest.fixture
def prompts() -> Queue:
    return Queue()


def test_two_are_asked_for_and_more_once_these_have_begun(prompts: Queue) -> None:
    prompts.add("abcd")
    assert prompts.choose() == "ab" and prompts.choose() == ""
    prompts.grant("ab")
    assert prompts.choose(waiting="ab") == ""
    assert prompts.choose(waiting="b") == "c"
    assert prompts.choose(waiting="") == "d", "c is still awaited, but is next now"


def test_all_prompts_of_the_next_step_are_asked_for(prompts: Queue) -> None:
    prompts.add("abcdefgh", num_tokens=30)
    assert prompts.choose(num_tokens=150) == "ab", "the next step is full"
    assert prompts.choose(num_tokens=0) == "cd", "90 tokens come before the last one"


def test_a_prompt_that_needs_no_grant_counts_only_where_it_came_first(prompts: Queue) -> None:
    prompts.add("xyabz")
    prompts.grant("xyz")
    assert prompts.choose(waiting="xyz") == ""
    assert prompts.choose(waiting="yz") == "a"
    assert prompts.choose(waiting="z") == "b", "z came later"


def test_a_full_decode_worker_holds_up_its_own_prompts_only(prompts: Queue) -> None:
    prompts.add("abcd")
    prompts.add("ef", D1)
    assert prompts.choose() == "ab"
    prompts.delay("ab")
    assert prompts.choose() == "ef", "c would be granted after a and b"
    prompts.grant("a")
    assert prompts.choose(waiting="a") == "c", "it came before e and f, and b alone is delayed"
    prompts.delay("c")
    prompts.grant("ef")
    assert prompts.choose() == ""
    prompts.grant("b")
    assert prompts.choose() == "d"


def test_a_prompt_that_was_asked_for_by_the_router_counts_until_it_is_delayed(prompts: Queue) -> None:
    prompts.add("ab", is_asked=True)
    prompts.add("cd", D1)
    assert prompts.choose() == ""
    prompts.delay("a", D1)
    assert prompts.choose() == "", "only its own decode worker can say so"
    prompts.delay("a")
    assert prompts.choose() == "c"


def test_it_asks_again_until_there_is_an_answer_and_gives_up_without_one(prompts: Queue) -> None:
    prompts.add("abc")
    assert prompts.choose() == "ab"
    assert prompts.queue.next_deadline() == PROTOCOL.offer_resend_seconds
    assert prompts.queue.take_due(0.4) == []
    prompts.now = PROTOCOL.offer_resend_seconds
    prompts.delay("a")
    assert [prompt.sequence.key.request_id for prompt in prompts.queue.take_due(prompts.now)] == ["b"]
    prompts.now = 2.4
    assert prompts.queue.take_due(prompts.now) != [] and prompts.queue.overdue(prompts.now) == []
    prompts.now = PROTOCOL.dead_after_seconds
    assert [prompt.sequence.key.request_id for prompt in prompts.queue.overdue(prompts.now)] == ["b"]
    prompts.grant("b")
    assert prompts.queue.overdue(prompts.now) == []
    prompts.now = PROTOCOL.offer_resend_seconds + PROTOCOL.dead_after_seconds
    assert [prompt.sequence.key.request_id for prompt in prompts.queue.overdue(prompts.now)] == ["a"]


def test_the_wait_for_a_full_decode_worker_is_told_from_the_wait_for_ones_turn(prompts: Queue) -> None:
    prompts.add("abcd")
    prompts.now = 1.0
    assert prompts.choose() == "ab"
    prompts.now = 2.0
    prompts.delay("ab")
    prompts.now = 7.0
    prompts.grant("a")
    assert prompts.choose(waiting="a") == "c"
    turns = {prompt.sequence.key.request_id: prompt.turn_at for prompt in prompts.queue.prompts}
    assert (turns["b"], turns["c"]) == (1.0, 2.0)
    prompts.grant("b")
    prompts.now = 9.0
    assert prompts.choose() == "d"
    turns = {prompt.sequence.key.request_id: prompt.turn_at for prompt in prompts.queue.prompts}
    assert turns["d"] == 9.0, "no prompt is delayed any more"
    prompts.grant("cd")
    assert len(prompts.queue) == 0 and prompts.queue.next_deadline() == float("inf")
