"""GPUs of this machine and their assignment to workers. Uses neither CUDA nor torch: ``nvidia-smi`` lists the GPUs."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,uuid,pci.bus_id,name,memory.total"
_MIB = 1 << 20
_CONTROL_DEVICE = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU of this machine."""

    index: int  # in PCI order, as ``nvidia-smi`` counts
    uuid: str
    pci_bus_id: str
    name: str
    memory_bytes: int


def list_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that processes with this environment may use; none without an NVIDIA driver.

    Raises :class:`ConfigError` if there is a driver that doesn't answer.
    """
    if not has_driver():
        return []
    try:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        raise ConfigError("there is an NVIDIA driver, but no nvidia-smi in PATH: GPUs can't be listed") from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi doesn't answer: {error}; look at the driver, or use --device cpu") from error
    return visible(parse_gpus(text), environment.get(VISIBLE))


def has_driver() -> bool:
    """Return whether there may be GPUs: quick, without asking the driver."""
    return _CONTROL_DEVICE.exists()


def parse_gpus(text: str) -> list[Gpu]:
    """Parse lines of ``nvidia-smi --format=csv,noheader,nounits``."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [Gpu(int(index), uuid, bus, name, int(mib) * _MIB) for index, uuid, bus, name, mib in rows]


def visible(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """Return the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` (indices, or UUIDs that may be cut short) makes visible.

    As in CUDA, entries after the first one that names no GPU don't count. A GPU that is named twice is one GPU. None:
    all GPUs.
    """
    if wanted is None:
        return gpus
    found: list[Gpu] = []
    for entry in (entry.strip() for entry in wanted.split(",")):
        matches = [
            gpu for gpu in gpus if entry == str(gpu.index) or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))
        ]
        if len(matches) != 1:
            break
        found += matches
    return list(dict.fromkeys(found))


def device_of(device: str, gpus: list[Gpu]) -> str:
    """Return ``cpu`` or ``cuda``: the meaning of a pool's ``device`` on a machine with these GPUs."""
    return ("cuda" if gpus else "cpu") if device == "auto" else device


def check_enough_gpus(spec: ClusterSpec, gpus: list[Gpu]) -> None:
    """Raise :class:`ConfigError` if there are too few GPUs for all ranks of the pools' workers."""
    if spec.devices.share and gpus:
        return
    wanted = [pool for pool in spec.pools if device_of(pool.device, gpus) == "cuda" and pool.count]
    needed = sum(pool.count * pool.tensor_parallel_size for pool in wanted)
    if needed > len(gpus):
        parts = ", ".join(f"{pool.name} {pool.count} x {pool.tensor_parallel_size}" for pool in wanted)
        remedy = "use fewer workers, `device: cpu`, or `devices: {share: true}` (--share-gpus)"
        raise ConfigError(f"{needed} GPUs are needed ({parts}) and {len(gpus)} visible; {remedy if gpus else _NO_GPU}")


_NO_GPU = "use --device cpu, or find out why nvidia-smi shows none (driver, container, CUDA_VISIBLE_DEVICES)"


@dataclass(slots=True)
class GpuAssignment:
    """Assignment of GPUs to workers. With ``share``, GPUs in use are assigned again, those with the fewest users
    first."""

    gpus: list[Gpu]
    share: bool = False
    _held: dict[str, list[Gpu]] = field(default_factory=dict)

    def num_free(self) -> int:
        """Return the number of GPUs that could be taken now."""
        return len(self.gpus) if self.share else len(self._free())

    def take(self, name: str, number: int) -> list[Gpu]:
        """Assign ``number`` different GPUs to ``name`` until :meth:`give_back`. Raises :class:`ConfigError` if too
        few."""
        if number > self.num_free():
            raise ConfigError(f"{name} needs {number} GPUs; {self.num_free()} of {len(self.gpus)} are free")
        users = {gpu.uuid: 0 for gpu in self.gpus}
        for gpu in self._all_held():
            users[gpu.uuid] += 1
        chosen = sorted(self.gpus, key=lambda gpu: (users[gpu.uuid], gpu.index))[:number]
        self._held[name] = chosen
        return chosen

    def give_back(self, name: str) -> None:
        """Free the GPUs of ``name``. Harmless if it has none."""
        self._held.pop(name, None)

    def _all_held(self) -> Iterable[Gpu]:
        return (gpu for gpus in self._held.values() for gpu in gpus)

    def _free(self) -> list[Gpu]:
        held = {gpu.uuid for gpu in self._all_held()}
        return [gpu for gpu in self.gpus if gpu.uuid not in held]
