"""Log-probabilities as steps and messages carry them: packed arrays, so that those of long prompts stay small."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.common.errors import ConfigError
from splitserve.protocol.wire_numbers import NumTop

_VALUE = np.dtype("<f4")
_TOKEN_ID = np.dtype("<i4")


class Logprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Natural logarithms of probabilities at N adjacent positions, by the raw logits: before sampling features,
    temperature, top-k and top-p."""

    num_top: NumTop
    values: bytes  # float32 [N, 1 + num_top]: the position's own token, then the most probable ones, best first
    top_ids: bytes  # int32 [N, num_top]

    def __post_init__(self) -> None:
        num_rows, rest = divmod(len(self.values), _VALUE.itemsize * (1 + self.num_top))
        if rest or len(self.top_ids) != num_rows * self.num_top * _TOKEN_ID.itemsize:
            held = f"{len(self.values)} and {len(self.top_ids)} bytes"
            raise ConfigError(f"{held} aren't the log-probabilities of tokens with {self.num_top} alternatives each")

    @classmethod
    def of(cls, values: npt.NDArray[np.float32], top_ids: npt.NDArray[np.integer]) -> "Logprobs":
        """Pack ``values`` [N, 1 + K] and ``top_ids`` [N, K]."""
        return cls(top_ids.shape[1], values.astype(_VALUE).tobytes(), top_ids.astype(_TOKEN_ID).tobytes())

    @classmethod
    def joined(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        """Return adjacent parts, at least one, with as many alternatives each, as one."""
        if len(parts) == 1:
            return parts[0]
        values, top_ids = b"".join([part.values for part in parts]), b"".join([part.top_ids for part in parts])
        return cls(parts[0].num_top, values, top_ids)

    @property
    def num_positions(self) -> int:
        return len(self.values) // (_VALUE.itemsize * (1 + self.num_top))

    def between(self, start: int, stop: int) -> "Logprobs":
        """Return the part from row ``start`` up to row ``stop``."""
        if start == 0 and stop == self.num_positions:
            return self
        value_bytes, id_bytes = _VALUE.itemsize * (1 + self.num_top), _TOKEN_ID.itemsize * self.num_top
        return Logprobs(
            self.num_top,
            self.values[start * value_bytes : stop * value_bytes],
            self.top_ids[start * id_bytes : stop * id_bytes],
        )

    def narrowed(self, num_top: int) -> "Logprobs":
        """Return the same with at most ``num_top`` alternatives."""
        if num_top >= self.num_top:
            return self
        values = np.frombuffer(self.values, _VALUE).reshape(-1, 1 + self.num_top)
        top_ids = np.frombuffer(self.top_ids, _TOKEN_ID).reshape(len(values), self.num_top)
        return Logprobs.of(values[:, : 1 + num_top], top_ids[:, :num_top])

    def is_finite(self) -> bool:
        """Return whether no value is NaN or infinite."""
        return bool(np.isfinite(np.frombuffer(self.values, _VALUE)).all())

    def rows(self) -> list[tuple[list[float], list[int]]]:
        """Return ``values`` and ``top_ids`` of each position."""
        values = np.frombuffer(self.values, _VALUE).reshape(-1, 1 + self.num_top).tolist()
        top_ids = np.frombuffer(self.top_ids, _TOKEN_ID).reshape(len(values), self.num_top).tolist()
        return list(zip(values, top_ids, strict=True))
