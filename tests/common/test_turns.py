"""Pieces of work take turns, the earliest request's first."""

import asyncio

from splitserve.common.turns import Turns


def test_a_burst_has_one_piece_per_turn_of_the_loop_and_the_earliest_goes_first() -> None:
    async def run() -> list[str]:
        turns, seen = Turns(), []

        async def work(name: str, arrived_at: float) -> None:
            await turns.take(arrived_at)
            seen.append(name)
            # What is ready meanwhile gets the loop before the next piece.
            asyncio.get_running_loop().call_soon(seen.append, "other")

        async with asyncio.TaskGroup() as group:
            for name, arrived_at in (("first", 5.0), ("late", 9.0), ("early", 1.0), ("middle", 7.0)):
                group.create_task(work(name, arrived_at))
        return seen

    seen = asyncio.run(run())
    assert [name for name in seen if name != "other"] == ["first", "early", "middle", "late"]
    assert [seen[at + 1] for at, name in enumerate(seen[:-1]) if name != "other"] == ["other"] * 4


def test_who_leaves_while_it_waits_holds_nobody_up() -> None:
    async def run() -> None:
        turns = Turns()
        await turns.take(0.0)
        waiting = [asyncio.ensure_future(turns.take(float(number))) for number in range(4)]
        await asyncio.sleep(0)  # the first of them gets its turn
        for task in waiting[1:3]:
            task.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting, return_exceptions=True)
        assert [task.cancelled() for task in waiting] == [False, True, True, False]
        async with asyncio.timeout(60):
            await turns.take(0.0)  # at once: nobody waits

    asyncio.run(run())
