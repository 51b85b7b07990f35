"""LMCache servers that a cluster needs, as workers start, move, die and leave."""

from splitserve.orchestration.lmcache.keeper import LMCacheKeeper, ServerState, is_lmcache, lmcache_on

A, B = lmcache_on("a"), lmcache_on("b")


def test_names() -> None:
    assert is_lmcache("lmcache") and is_lmcache(A)
    assert not any(map(is_lmcache, ("lmcache-0", "router", "prefill-0")))


def test_a_server_is_started_once_where_workers_are() -> None:
    keeper = LMCacheKeeper()
    assert keeper.next_due() == float("inf")
    keeper.use("w-0", A, 1.0)
    keeper.use("w-1", A, 1.5)
    keeper.use("w-2", B, 2.0)
    assert keeper.next_due() == 1.0
    assert keeper.take_due(1.0, ()) == [A]
    assert keeper.take_due(2.0, [A]) == [B]
    assert keeper.take_due(9.0, [A, B]) == [] and keeper.next_due() == float("inf")


def test_it_is_started_again_later_and_later() -> None:
    keeper, now, waits = LMCacheKeeper(), 0.0, []
    keeper.use("w-0", A, now)
    for _ in range(4):
        assert keeper.take_due(now, ()) == [A]
        keeper.on_exit(A, now)
        waits.append(keeper.next_due() - now)
        now = keeper.next_due()
    assert 0 < waits[0] < waits[2] and waits[1] < waits[3]
    assert keeper.take_due(now, ()) == [A]
    keeper.on_ready(A, now)
    keeper.on_exit(A, now + 1000)
    assert keeper.take_due(now + 1000, ()) == [A], "it had served for long"


def test_it_ends_with_the_last_worker_that_will_not_come_back() -> None:
    keeper = LMCacheKeeper()
    for worker in ("w-0", "w-1"):
        keeper.use(worker, A, 0.0)
    assert keeper.take_due(0.0, ()) == [A]
    keeper.leave("w-0")
    keeper.leave("w-0")
    assert keeper.take_unused([A]) == []
    keeper.use("w-1", A, 1.0)  # it was started again at the same place
    assert keeper.take_unused([A]) == []
    keeper.use("w-1", B, 2.0)  # and elsewhere
    assert keeper.take_unused([A]) == [A] and keeper.take_unused([A]) == []
    keeper.on_exit(A, 3.0)
    assert keeper.take_due(9.0, ()) == [B], "it isn't started again"
    keeper.leave("w-1")
    assert keeper.take_unused([]) == [], "it doesn't run"
    assert keeper.next_due() == float("inf")


def test_one_that_is_about_to_end_comes_back_for_a_new_worker() -> None:
    keeper = LMCacheKeeper()
    keeper.use("w-0", A, 0.0)
    keeper.take_due(0.0, ())
    keeper.leave("w-0")
    assert keeper.take_unused([A]) == [A]
    keeper.use("w-1", A, 1.0)
    assert keeper.take_due(1.0, [A]) == [] and keeper.next_due() == float("inf")
    keeper.on_exit(A, 2.0)
    assert keeper.take_due(keeper.next_due(), ()) == [A]


def test_states_for_people() -> None:
    keeper = LMCacheKeeper()
    keeper.use("w-0", B, 0.0)
    keeper.use("w-1", A, 3.0)
    assert [*keeper.states(1.0)] == [ServerState(A, None, 2.0), ServerState(B, None, 0.0)]
    keeper.take_due(3.0, ())
    keeper.on_ready(A, 5.0)
    assert [*keeper.states(7.0)] == [ServerState(A, 2.0, None), ServerState(B, None, None)]
    keeper.on_down(A)
    assert next(keeper.states(8.0)).seconds_ready is None and keeper.not_ready() == [B], "it has answered once"
    keeper.on_ready(A, 9.0)
    assert next(keeper.states(9.5)).seconds_ready == 0.5
    keeper.on_down(A)
    keeper.on_exit(A, 10.0)
    keeper.take_due(keeper.next_due(), ())
    keeper.on_ready(A, 20.0)
    assert next(keeper.states(21.0)) == ServerState(A, 1.0, None)


def test_the_ones_that_a_start_waits_for() -> None:
    keeper = LMCacheKeeper()
    assert keeper.not_ready() == []
    keeper.use("w-0", B, 0.0)
    keeper.use("w-1", A, 0.0)
    keeper.take_due(0.0, ())
    assert keeper.not_ready() == [A, B]
    keeper.on_ready(A, 1.0)
    assert keeper.not_ready() == [B]
    keeper.on_exit(A, 2.0)
    keeper.on_ready(B, 2.0)
    assert keeper.not_ready() == [A]


def test_servers_of_a_launcher_before_this_one_go_on() -> None:
    keeper = LMCacheKeeper()
    assert keeper.adopt(["router", "w-0", A]) == {A}
    assert keeper.take_unused([A]) == [] and keeper.take_due(9.0, [A]) == []
    keeper.use("w-0", A, 9.0)
    assert keeper.take_due(9.0, [A]) == []
    keeper.on_exit(A, 10.0)
    assert keeper.take_due(20.0, ()) == [A]
