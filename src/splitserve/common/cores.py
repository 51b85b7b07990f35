"""The cores that this process may use, and how they are split between workers.

Cores are taken from the process's own affinity mask and its cgroup's CPU quota, never from the machine's
count: a container with two of 64 cores must not start 64 threads. Hardware threads of one core count once:
their GEMMs would only compete for its vector units.
"""

import os
from collections.abc import Iterable
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CPU_ROOT = Path("/sys/devices/system/cpu")


def split_cores(num_cores: int, num_workers: int) -> list[int]:
    """Threads per worker: as even as whole cores allow, at least one each; the first workers get the remainder.

    The sum is ``num_cores`` unless there are more workers than cores, where everyone has one.
    """
    if num_workers < 1:
        return []
    share, remainder = divmod(max(num_cores, 1), num_workers)
    return [max(1, share + (index < remainder)) for index in range(num_workers)]


def usable_cpus() -> set[int]:
    """Hardware threads of this process's affinity mask; all that there are where the platform has none (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def by_core(cpus: Iterable[int], cpu_root: Path = _CPU_ROOT) -> list[int]:
    """Return hardware threads with those of one core next to each other, in the order of the cores' first ones."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(_siblings(cpu_root, cpu), []).append(cpu)
    return [cpu for core in cores.values() for cpu in core]


def available_cores() -> int:
    """Return the number of physical cores that this process may use: those of its affinity mask, at most its cgroup's
    quota, at least one."""
    num_cores = count_physical_cores(_CPU_ROOT, usable_cpus())
    quota = current_cpu_quota()
    return max(1, num_cores if quota is None else min(num_cores, int(quota)))


def awake_cpus(cpus: Iterable[int], cpu_root: Path = _CPU_ROOT) -> set[int]:
    """Return the hardware threads to keep awake: one of each core that has two of ``cpus``, else every other core's.

    Not more of them: Linux decides by the average load of all hardware threads, spinning included, whether to search
    for an idle core. If all of them spin, it stops searching, and threads wait for each other beside unused cores.
    """
    all_cpus = sorted(cpus, key=lambda cpu: (_topology(cpu_root, cpu, "physical_package_id"), cpu))
    first = list({_siblings(cpu_root, cpu): cpu for cpu in reversed(all_cpus)}.values())[::-1]
    return set(first if 2 * len(first) <= len(all_cpus) + 1 else first[::2])


def current_cpu_quota() -> float | None:
    """Return this process's CPU quota: see :func:`cpu_quota`."""
    return cpu_quota(_CGROUP_ROOT, "\n".join(_read_lines(Path("/proc/self/cgroup"))))


def count_physical_cores(cpu_root: Path, cpus: Iterable[int]) -> int:
    """Return the number of cores of ``cpus`` (hardware thread ids). A thread of an unknown core counts as one core."""
    return len({_siblings(cpu_root, cpu) for cpu in cpus})


def _siblings(cpu_root: Path, cpu: int) -> str:
    return _topology(cpu_root, cpu, "thread_siblings_list") or str(cpu)


def _topology(cpu_root: Path, cpu: int, name: str) -> str:
    """Return the kernel's topology entry ``name`` of a hardware thread; "" if there is none."""
    return "".join(_read_lines(cpu_root / f"cpu{cpu}" / "topology" / name))


def cpu_quota(cgroup_root: Path, memberships: str) -> float | None:
    """Return the tightest CPU quota, in cores, of a process's cgroups and their ancestors; None if there is no limit.

    ``memberships`` is the text of ``/proc/<pid>/cgroup``. Supports cgroups of version 2 (``cpu.max``) and 1
    (``cpu.cfs_quota_us``).
    """
    quotas: list[float] = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _quotas_upwards(cgroup_root, path)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_upwards(cgroup_root / controllers, path) or _quotas_upwards(cgroup_root / "cpu", path)
    return min(quotas, default=None)


def _quotas_upwards(root: Path, path: str) -> list[float]:
    """Quotas of the cgroup at ``path`` below ``root`` and of all its ancestors.

    Inside a container the path may name a folder that only the host sees: the root then is the container's own.
    """
    folder = root / path.strip("/") if ".." not in path else root
    quotas = [_quota(folder)]
    while folder != root:
        folder = folder.parent
        quotas.append(_quota(folder))
    return [quota for quota in quotas if quota is not None]


def _quota(folder: Path) -> float | None:
    words = " ".join(_read_lines(folder / "cpu.max")).split()
    if not words:
        words = _read_lines(folder / "cpu.cfs_quota_us") + _read_lines(folder / "cpu.cfs_period_us")
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _read_lines(path: Path) -> list[str]:
    """Lines of a small file of the kernel; none where it doesn't exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
