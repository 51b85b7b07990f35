"""``splitserve bench router``: what single stages of a long prompt take."""

from array import array

from splitserve.benchmarks.router_overhead import prompt_stages


def test_stages_of_a_prompt_are_timed_where_all_of_it_hits() -> None:
    stages = prompt_stages(array("i", range(300)))
    assert {name.partition(":")[0] for name in stages} == {"router", "worker", "message out", "message in"}
    assert all(milliseconds > 0 for milliseconds in stages.values())
