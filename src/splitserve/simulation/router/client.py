"""A client of the simulator: it prepares and submits its prompt, retries after a rejection, and may leave early."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from splitserve.protocol.request import FinishReason, SamplingParams
from splitserve.router.placement.placer import Limits
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.events import AskLimits, Cancel, StopStringReached, Submit
from splitserve.router.requests.state import Failure, FailureReason, RequestPhase, Update
from splitserve.simulation.model import expected_scores

if TYPE_CHECKING:
    from splitserve.simulation.router.driver import SimRouter

RETRY_SECONDS = 0.5  # after a 503
PREPARATION_SECONDS = 0.005  # at most, from the limits to the submitted prompt


class SimClient:
    """The HTTP layer's part for one choice of a prompt; that of the first one stands for all until they begin: limits,
    admission, preparation, submission. ``output`` is the answer."""

    def __init__(self, router: "SimRouter", request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        self._router = router
        self._sim = router.sim
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.output: list[int] = []
        self.updates: list[tuple[Sequence[int], FinishReason | None]] = []  # the output as it came
        self.scores: list[float] = []  # log-probabilities of the output
        self.prompt_scores: list[float] | None = None  # those of the prompt; None: they haven't come
        self.request: ActiveRequest | None = None  # submitted last
        self.first: SimClient | None = None  # of the prompt's first choice, if it isn't this one
        self.siblings: list[SimClient] = []  # of the other choices, which begin with it
        self.has_begun = False
        self.has_left = False
        self.is_rejected = False  # no worker has room for so many tokens
        self.was_helpless = False  # it failed while no worker could continue it
        self.was_unsent = False  # a worker's link rejected it
        self._num_questions = 0
        self._leaves_after_seconds: float | None = None  # counted from its begin

    @property
    def is_done(self) -> bool:
        """Return whether nothing more will happen to the request."""
        if self.has_begun and self.request is not None:
            return self.request.state.ended
        if self.first is not None:
            return self.first.is_done
        return self.has_left or self.is_rejected

    # ---- actions ----

    def leave_once_begun(self) -> None:
        """Leave early, while the request runs."""
        self._leaves_after_seconds = self._sim.random.uniform(0.0, 0.3)

    def leave_some_time(self) -> None:
        """Leave early: mostly while the request runs, else at any moment soon."""
        seconds = self._sim.random.uniform(0.0, 0.3)
        if self._sim.random.random() < 0.75:
            self._leaves_after_seconds = seconds
        else:
            self._sim.after(seconds, self.leave)

    def add_sibling(self, choice: int) -> "SimClient":
        """Add the client of another choice of the prompt."""
        sampling = msgspec.structs.replace(self.sampling, choice=choice)
        sibling = SimClient(self._router, f"{self.request_id}-{choice}", self.prompt, sampling)
        sibling.first = self
        self.siblings.append(sibling)
        return sibling

    def ask(self) -> None:
        """Ask the router for the limits on requests."""
        if not self.has_left:
            self._num_questions += 1
            self._router.handle(AskLimits(self._question_id, self._sim.now))

    def submit(self) -> None:
        """Submit the prepared prompt."""
        if self.has_left:
            return
        self._router.core.admission.admit(1 + len(self.siblings))
        self.request = ActiveRequest.new(self.request_id, array("i", self.prompt), self.sampling, self._sim.now)
        for choice, sibling in enumerate(self.siblings, start=1):
            sibling.request = self.request.add_sibling(sibling.request_id, choice)
        self._router.handle(Submit(self.request))

    def leave(self) -> None:
        """Close the connection, or end the answer as a stop string does, wherever the request is now."""
        self.has_left = True
        self._router.handle(Cancel(self._question_id))
        if self.request is None:
            return
        has_enough = bool(self.output) and self._sim.random.random() < 0.5
        is_waiting = not self.has_begun and self.request_id in dict(self._router.core.waiting_room.in_line())
        self._router.handle((StopStringReached if has_enough else Cancel)(self.request_id))
        if is_waiting:
            self._router.core.admission.release(1 + len(self.siblings))

    @property
    def _question_id(self) -> str:
        return f"{self.request_id}?{self._num_questions}"

    # ---- the router's effects ----

    def on_limits(self, limits: Limits) -> None:
        """Go on with a prompt that fits; one that doesn't is rejected."""
        assert not self.has_left, f"{self.request_id} is told limits, but its client has left"
        if len(self.prompt) + self.sampling.max_tokens > limits.max_model_len:
            self.is_rejected = True  # 400
            return
        self._sim.after(self._sim.random.uniform(0.0, PREPARATION_SECONDS), self.submit)

    def on_begun(self) -> None:
        """Note that the request was placed for the first time."""
        assert not self.has_left, f"{self.request_id} begins, but its client has left"
        assert not self.has_begun, f"{self.request_id} begins twice"
        self.has_begun = True
        if self._leaves_after_seconds is not None:
            self._sim.after(self._leaves_after_seconds, self.leave)

    def on_refused(self, refused_id: str) -> None:
        """Try again later."""
        assert not self.has_left, f"{self.request_id} is refused, but its client has left"
        if refused_id == self.request_id:
            self._router.core.admission.release(1 + len(self.siblings))
        self._sim.after(RETRY_SECONDS, self.ask)

    def on_update(self, update: Update) -> None:
        """Take tokens, or the end."""
        assert self.has_begun and self.request is not None, f"an update of {self.request_id}, which has not begun"
        self.request.state.check_invariants()
        if update.prompt_logprobs is not None:
            assert self.prompt_scores is None, f"{self.request_id} gets the prompt's log-probabilities twice"
            self.prompt_scores = [values[0] for values, _ in update.prompt_logprobs.rows()]
        self.output += update.token_ids
        self.updates.append((update.token_ids, update.finish_reason))
        if update.logprobs is not None:
            self.scores += [values[0] for values, _ in update.logprobs.rows()]
        self._check_scores()
        if update.ended:
            self._router.core.admission.release(1)
        if update.failure is not None and update.failure.reason is FailureReason.DEADLINE:
            since = self.request.stranded_at
            self.was_helpless = since is not None and not self._router.was_able_since(since)

    def _check_scores(self) -> None:
        """Check that each delivered token has its log-probability, and none comes before those of the prompt."""
        wants_output, wants_prompt = self.sampling.logprobs is not None, self.sampling.prompt_logprobs is not None
        assert len(self.scores) == (len(self.output) if wants_output else 0), f"{self.request_id}: {self.scores}"
        is_short = len(self.prompt) == 1
        assert not self.output or (self.prompt_scores is not None) == (wants_prompt and not is_short), (
            f"{self.request_id} gets tokens before the prompt's log-probabilities"
        )
        if (wants_output or wants_prompt) and self.request_id not in self._sim.liar.deceived:
            expected = expected_scores([*self.prompt, *self.output])
            first = len(self.prompt) - 1
            assert not wants_output or self.scores == expected[first:], f"{self.request_id}: other log-probabilities"
            assert self.prompt_scores in (None, expected[:first]), f"{self.request_id}: other ones of the prompt"

    # ---- the end ----

    def check_answer(self) -> None:
        """Check that the tokens are those of an undisturbed worker: all of them, if any worker could compute them."""
        if self.request is None or not self.has_begun:
            return
        state = self.request.state
        is_complete = state.phase is RequestPhase.FINISHED and not self.has_left
        if self._sim.faults.rounding or self._was_deceived:
            is_long = len(self.output) == self.sampling.max_tokens
            assert not is_complete or is_long, f"{self.request_id}: too short"
        else:
            expected = self._sim.model.expected_output(self.prompt, self.sampling)
            expected = expected if is_complete else expected[: len(self.output)]
            assert self.output == expected, f"{self.request_id}: wrong tokens, {self.output} instead of {expected}"
        if state.failure is not None:
            assert self._may_fail(state.failure), f"{self.request_id} failed without need: {state.failure.message}"

    @property
    def _was_deceived(self) -> bool:
        """Return whether a lie was told about the request, or about the first choice, whose KV it shares."""
        deceived = self._sim.liar.deceived
        return self.request_id in deceived or (self.first is not None and self.first.request_id in deceived)

    def _may_fail(self, failure: Failure) -> bool:
        if self.was_helpless or self._sim.faults.step_error > 0:
            return True
        if failure.reason is FailureReason.PAUSED:
            return self.request_id in self._router.pauses.aborted
        if failure.reason is FailureReason.CONTRADICTION:
            return self._was_deceived
        return self.was_unsent and failure.reason is not FailureReason.DEADLINE
