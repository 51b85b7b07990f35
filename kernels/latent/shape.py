"""Sizes of latent attention, as plain values. No torch here: configs are read with them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention (MLA, arXiv:2405.04434), whose cache has one vector per token and layer: the latent,
    from which all heads' keys and values are expanded, and a rotated part of the key that all heads share."""

    rank: int  # elements of the latent
    plain_dim: int  # elements of a head's queries and keys that are not rotated
    rotated_dim: int  # those that are
    value_dim: int  # elements of a head's values

    @property
    def width(self) -> int:
        """Elements of a token in the cache of one layer."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.plain_dim + self.rotated_dim
