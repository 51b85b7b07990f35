"""The order of a head's elements in memory. No torch here.

The kernels rotate element ``i`` of a head with element ``i + D / 2``. Checkpoints that rotate a part of the head, or
neighbouring elements, get there by another order of the rows of their projections, made once at load: scores are sums
over the elements, in any order.
"""


def rotary_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """Return the stored element for each position of a head; None: as stored."""
    if interleaved:
        first, second = range(0, rotary_dim, 2), range(1, rotary_dim, 2)
    else:
        first, second = range(rotary_dim // 2), range(rotary_dim // 2, rotary_dim)
    half = (head_dim - rotary_dim) // 2
    order = (*first, *range(rotary_dim, rotary_dim + half), *second, *range(rotary_dim + half, head_dim))
    return None if order == tuple(range(head_dim)) else order
