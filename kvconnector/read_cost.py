"""What a read costs on a link, by a model with few numbers that are measured when connecting."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Of copies to their place from a staging area."""

    seconds_fixed: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Of one thread's reads: a fixed time each, one per descriptor, and the bytes."""

    seconds_fixed: float
    seconds_per_descriptor: float
    bytes_per_second: float
    copy: CopyCost | None = None

    def read_seconds(self, num_reads: int, num_descriptors: int, num_bytes: int) -> float:
        return (
            num_reads * self.seconds_fixed
            + num_descriptors * self.seconds_per_descriptor
            + num_bytes / self.bytes_per_second
        )

    def copy_seconds(self, num_copies: int, num_bytes: int) -> float:
        if self.copy is None:
            return 0.0
        return num_copies * self.copy.seconds_fixed + num_bytes / self.copy.bytes_per_second


def fit(small: float, many: float, num_many: int, large: float, large_bytes: int) -> ReadCost:
    """From the seconds of three reads: one small descriptor, ``num_many`` small ones, ``large_bytes`` in one."""
    per_descriptor = max((many - small) / (num_many - 1), 1e-9)
    fixed = max(small - per_descriptor, 1e-9)
    return ReadCost(fixed, per_descriptor, large_bytes / max(large - small, 1e-9))
