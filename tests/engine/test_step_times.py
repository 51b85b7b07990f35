"""The times of steps: the pace of launches, and how long steps of each size take."""

import pytest

from splitserve.engine.steps.launch_pace import FEWEST, MARGIN_SECONDS, LaunchPace
from splitserve.engine.steps.step_times import MIN_LIKE_STEPS, MIN_STEPS, StepTimes, describe
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)


def batch(num_decodes: int, *prefills: tuple[int, int]) -> StepPlan:
    """``prefills``: tokens, start."""
    decodes = [ScheduledChunk([1], 9, [0], GREEDY)] * num_decodes
    return StepPlan([*decodes, *(ScheduledChunk([1] * count, start, [0], None) for count, start in prefills)])


class TestLaunchPace:
    def test_nothing_is_waited_for_before_enough_is_known(self) -> None:
        pace = LaunchPace()
        for _ in range(FEWEST):
            assert pace.seconds_to_wait(batch(16)) == 0.0
            pace.note_step(batch(16), 0.005)
        assert pace.seconds_to_wait(batch(16)) == 0.0
        for _ in range(FEWEST):
            pace.note_launch(0.001)
        assert pace.seconds_to_wait(batch(16)) == pytest.approx(0.004 - MARGIN_SECONDS)
        assert pace.seconds_to_wait(batch(64)) == 0.0

    def test_steps_with_prompts_beside_are_known_by_the_number_of_tokens(self) -> None:
        pace = self.settled()
        for _ in range(FEWEST):
            assert pace.seconds_to_wait(batch(16, (320, 512))) == 0.0
            pace.note_step(batch(16, (320, 512)), 0.015)
            pace.note_step(batch(16, (64, 832)), 0.007)
        assert pace.seconds_to_wait(batch(17, (300, 0), (15, 0))) == pytest.approx(0.014 - MARGIN_SECONDS)
        assert pace.seconds_to_wait(batch(16, (50, 0))) == pytest.approx(0.006 - MARGIN_SECONDS)
        assert pace.seconds_to_wait(batch(16)) == pytest.approx(0.004 - MARGIN_SECONDS)

    def test_long_prompts_are_followed_at_once(self) -> None:
        """Steps of a prompt alone are short while a hand-over is on its way, and known like others."""
        pace = self.settled()
        for _ in range(FEWEST):
            pace.note_step(batch(0, (2048, 0)), 0.05)
            pace.note_step(batch(0, (320, 0)), 0.01)
        assert pace.seconds_to_wait(batch(0, (2048, 0))) == 0.0
        assert pace.seconds_to_wait(batch(0, (320, 2048))) == pytest.approx(0.009 - MARGIN_SECONDS)

    def test_the_shortest_step_and_the_slow_launches_count(self) -> None:
        pace = self.settled()
        pace.note_step(batch(18), 0.0045)
        for _ in range(8):
            pace.note_launch(0.002)
        assert pace.seconds_to_wait(batch(17)) == pytest.approx(0.0045 - 0.002 - MARGIN_SECONDS)

    def test_recent_steps_of_as_many_sequences_are_preferred(self) -> None:
        pace = self.settled()
        for seconds in (0.0052, 0.0051, 0.0053, 0.0054):
            pace.note_step(batch(17), seconds)
            pace.note_step(batch(16), 0.005)
        assert pace.seconds_to_wait(batch(17)) == pytest.approx(0.0051 - 0.001 - MARGIN_SECONDS)
        for _ in range(8):
            pace.note_step(batch(17), 0.006)
        assert pace.seconds_to_wait(batch(17)) == pytest.approx(0.006 - 0.001 - MARGIN_SECONDS), "contexts have grown"

    def test_launches_that_take_longer_than_a_step_are_begun_at_once(self) -> None:
        pace = self.settled()
        for _ in range(10):
            pace.note_launch(0.006)
        assert pace.seconds_to_wait(batch(16)) == 0.0

    @staticmethod
    def settled() -> LaunchPace:
        pace = LaunchPace()
        for _ in range(100):
            pace.note_step(batch(16), 0.005)
            pace.note_launch(0.001)
        return pace


class TestStepTimes:
    def settled(self, seconds: float = 0.005) -> StepTimes:
        times = StepTimes()
        for _ in range(MIN_STEPS):
            assert times.note(batch(16), seconds) is None
        return times

    def test_a_stall_is_told_with_its_shape(self) -> None:
        warning = self.settled().note(batch(16), 1.02)
        assert warning == "a step took 1.02 s, where steps of its size take 5.0 ms: 16 decode tokens"

    def test_the_first_step_of_a_size_may_take_longer_but_not_for_ever(self) -> None:
        times = self.settled()
        mixed = batch(16, (320, 512))
        assert times.note(mixed, 0.4) is None
        warning = times.note(mixed, 1.02)
        assert warning is not None and warning.endswith("16 decode tokens, prefill chunks of 320 tokens after 512")

    def test_sizes_have_their_own_times(self) -> None:
        """A large prefill on a CPU takes a hundred times as long as a decode step, and that is no stall."""
        times = self.settled(0.16)
        for _ in range(2 * MIN_LIKE_STEPS):
            assert times.note(batch(0, (512, 0)), 3.5) is None
        assert times.note(batch(0, (512, 0)), 3.5 * 19) is None
        assert times.note(batch(0, (512, 0)), 3.5 * 21) is not None

    def test_nothing_is_slow_before_there_is_something_to_compare_with(self) -> None:
        times = StepTimes()
        assert [times.note(batch(1), 30.0) for _ in range(MIN_STEPS)] == [None] * MIN_STEPS

    def test_short_steps_are_never_slow(self) -> None:
        assert self.settled(0.0001).note(batch(16), 0.49) is None

    def test_description(self) -> None:
        assert describe(batch(2, (64, 0), (3, 128))) == (
            "2 decode tokens, prefill chunks of 64 tokens after 0, 3 tokens after 128"
        )
        assert describe(batch(0, (1, 0))) == "prefill chunks of 1 tokens after 0"
