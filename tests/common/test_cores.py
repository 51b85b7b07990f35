"""Cores that this process may use: counted, split between workers, bounded by quotas."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from splitserve.common.cores import (
    available_cores,
    awake_cpus,
    by_core,
    count_physical_cores,
    cpu_quota,
    split_cores,
)


@given(num_cores=st.integers(1, 512), num_workers=st.integers(1, 64))
def test_cores_are_split_evenly_and_never_oversubscribed(num_cores: int, num_workers: int) -> None:
    threads = split_cores(num_cores, num_workers)
    assert len(threads) == num_workers
    assert min(threads) >= 1
    assert max(threads) - min(threads) <= 1
    assert sum(threads) == max(num_cores, num_workers)


def test_no_workers_need_no_cores() -> None:
    assert split_cores(4, 0) == []


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert count_physical_cores(tmp_path, [0, 1, 2, 3]) == 2
    assert count_physical_cores(tmp_path, [0, 2]) == 1
    assert count_physical_cores(tmp_path, [0, 7, 8]) == 3  # unknown ones are cores of their own
    assert awake_cpus([3, 2, 1, 0], tmp_path) == {0, 1}, "one of each core"
    assert awake_cpus([0, 2, 1], tmp_path) == {0, 1}
    assert awake_cpus([0, 1, 8, 7, 10], tmp_path) == {0, 7, 10}, "every other core"
    assert awake_cpus([5], tmp_path) == {5}
    assert by_core([3, 9, 2, 1, 0], tmp_path) == [0, 2, 1, 3, 9]
    for cpu in range(20, 28):  # two sockets that take turns
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
    assert awake_cpus(range(20, 28), tmp_path) == {20, 24, 21, 25}


@given(cpus=st.sets(st.integers(0, 200), min_size=1))
def test_about_half_of_the_cores_are_kept_awake(cpus: set[int]) -> None:
    """Whatever this machine's cores are."""
    assert awake_cpus(cpus) <= cpus and 1 <= len(awake_cpus(cpus)) <= (len(cpus) + 1) // 2


def test_quota_of_version_2_is_the_tightest_upwards(tmp_path: Path) -> None:
    leaf = tmp_path / "pods" / "one"
    leaf.mkdir(parents=True)
    (leaf / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, "0::/pods/one") is None
    (tmp_path / "pods" / "cpu.max").write_text("250000 100000\n")
    assert cpu_quota(tmp_path, "0::/pods/one") == 2.5
    (leaf / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, "0::/pods/one\n1:name=systemd:/x") == 1.5
    assert cpu_quota(tmp_path, "0::/../elsewhere") is None


def test_quota_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path, "3:cpu,cpuacct:/job\n4:memory:/job") is None
    (folder / "cpu.cfs_quota_us").write_text("400000\n")
    assert cpu_quota(tmp_path, "3:cpu,cpuacct:/job\n4:memory:/job") == 4.0


def test_this_process_has_cores() -> None:
    assert available_cores() >= 1
