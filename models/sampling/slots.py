"""Tables on the device with a row for each slot. They grow by doubling: memory is taken only when features are used."""

import torch
from torch import Tensor


class SlotTable:
    """Zeros [slots, width], of a dtype, that grow with the slots and widths in use."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((0, width), dtype=dtype, device=device)

    def reserve(self, num_slots: int, width: int = 0) -> None:
        """Make room for that many slots, of at least that width; values stay."""
        slots, columns = self.values.shape
        wanted = (_grown(slots, num_slots), _grown(columns, width))
        if wanted != (slots, columns):
            larger = self.values.new_zeros(wanted)
            larger[:slots, :columns] = self.values
            self.values = larger

    def row(self, slot: int) -> Tensor:
        """Return a slot's row, a view."""
        return self.values[slot]


def _grown(present: int, needed: int) -> int:
    return present if needed <= present else max(needed, 2 * present)
