"""Cost model of reads over a link: a few numbers, measured when connecting."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of copies: a fixed time each, and the bytes."""

    seconds_fixed: float
    bytes_per_second: float

    def seconds(self, num_copies: int, num_bytes: int) -> float:
        return num_copies * self.seconds_fixed + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Cost of one thread's reads: a fixed time each, a time per descriptor, and the bytes."""

    seconds_fixed: float
    seconds_per_descriptor: float
    bytes_per_second: float

    def seconds(self, num_reads: int, num_descriptors: int, num_bytes: int) -> float:
        return (
            num_reads * self.seconds_fixed
            + num_descriptors * self.seconds_per_descriptor
            + num_bytes / self.bytes_per_second
        )

    def __str__(self) -> str:
        fixed, each = self.seconds_fixed * 1e6, self.seconds_per_descriptor * 1e6
        return f"{fixed:.0f} us + {each:.1f} us per descriptor + bytes at {self.bytes_per_second / 1e9:.0f} GB/s"


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Costs of reads from one peer, by operation; None for what is impossible or not worthwhile."""

    transport: LinkCost  # posted reads
    copy: CopyCost  # from a staging area to the blocks
    gather: CopyCost | None = None  # from the request to the source until its ticket is found
    mapped: LinkCost | None = None  # copies through a mapping; a run of blocks is one descriptor
    kernel: LinkCost | None = None  # a kernel that copies through a mapping

    @property
    def bytes_per_second(self) -> float:
        """Speed of one thread's large read, by the fastest path."""
        return max(link.bytes_per_second for link in (self.transport, self.mapped, self.kernel) if link is not None)


def fit(small: float, many: float, num_many: int, large: float, large_bytes: int) -> LinkCost:
    """Fit the cost to the seconds of three reads: one small descriptor, ``num_many`` small ones, ``large_bytes`` in
    one.

    At least half of the large read's time is attributed to its bytes, even if the small one took longer.
    """
    per_descriptor = max((many - small) / max(1, num_many - 1), 1e-9)
    byte_seconds = max(large - small, large / 2, 1e-9)
    return LinkCost(max(small - per_descriptor, 1e-9), per_descriptor, large_bytes / byte_seconds)


def fit_blocks(
    one: float, adjacent: float, apart: float, num_many: int, block_bytes: int, *, num_spans: int
) -> LinkCost:
    """Fit the cost to the seconds of three reads: one block, ``num_many`` adjacent ones, ``num_many`` that are not
    adjacent.

    A run of adjacent blocks is one descriptor for each of ``num_spans`` spans, which together have ``block_bytes`` of a
    block. At least half of the adjacent blocks' time is attributed to their bytes, as in :func:`fit`.
    """
    per_run = max((apart - adjacent) / (num_many - 1), 1e-9)
    bytes_per_second = (num_many - 1) * block_bytes / max(adjacent - one, adjacent / 2, 1e-9)
    fixed = max(one - per_run - block_bytes / bytes_per_second, 1e-9)
    return LinkCost(fixed, per_run / num_spans, bytes_per_second)


def fit_copies(small: float, small_bytes: int, large: float, large_bytes: int) -> CopyCost:
    """Fit the cost to the seconds of a small copy and of a larger one; if both have the same size, to the bytes
    alone."""
    if large_bytes == small_bytes:
        return CopyCost(0.0, large_bytes / max(large, 1e-9))
    rate = (large_bytes - small_bytes) / max(large - small, 1e-9)
    return CopyCost(max(small - small_bytes / rate, 0.0), rate)
