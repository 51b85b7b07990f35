"""The lanes in which pytest-xdist runs the tests: no name of a module that is gone, the long ones first."""

from pathlib import Path

from lanes import ALONE, BESIDE_OTHERS, CLUSTERS, IN_TURN, ON_CLUSTERS, SECONDS, lane_of, seconds_of

TESTS = Path(__file__).parents[1]


def test_every_name_is_a_module() -> None:
    assert not [
        name for name in BESIDE_OTHERS | IN_TURN | ON_CLUSTERS | set(SECONDS) if not (TESTS / f"{name}.py").is_file()
    ]


def test_a_module_is_in_one_lane() -> None:
    assert not BESIDE_OTHERS & ON_CLUSTERS
    assert not [name for name in SECONDS if lane_of(f"tests/{name}.py::test") != name]


def test_what_uses_ucx_or_lmcache_in_the_tests_process_is_alone() -> None:
    words = ("nixl_reader", "nixl_source", "ranked_worker", "probed_server", "kvconnector.nixl.connector", "Leftovers")
    modules = {path.relative_to(TESTS).with_suffix("").as_posix(): path for path in TESTS.rglob("test_*.py")}
    with_them = {name for name, path in modules.items() if any(word in path.read_text() for word in words)}
    assert "benchmarks/test_chaos" in with_them and "kvconnector/test_nixl_links" in with_them
    assert not [name for name in with_them if lane_of(f"tests/{name}.py::test") != ALONE]


def test_the_longest_begin_first() -> None:
    lanes = {lane_of(f"tests/{path.relative_to(TESTS).as_posix()}::test") for path in TESTS.rglob("test_*.py")}
    first, second, third, *others = sorted(lanes, key=seconds_of, reverse=True)
    assert (first, second) == (ALONE, CLUSTERS)
    assert seconds_of(third) == max(SECONDS.values()) and others
