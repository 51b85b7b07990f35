"""``constraint``: only tokens with which the output still matches a grammar are drawn.

Masks are made on the host while the device computes the step's logits, from matchers that have taken all earlier
tokens, the last of which is known by then.
"""

from pathlib import Path

import torch
from torch import Tensor

from splitserve.common.cores import available_cores
from splitserve.models.constraints.grammars import Grammars
from splitserve.models.constraints.masks import DeviceMasks, HostMasks, MaskMaker
from splitserve.models.constraints.progress import Progress
from splitserve.models.sampling.feature import Draw, Feature, LogitKernels, Rows
from splitserve.protocol.step import FeatureStart

_MAX_THREADS = 4  # more wake up later than they help


class Grammar(Feature):
    """Gives tokens that the grammar doesn't allow a logit below all others. The first of the features: penalties,
    biases and bans then choose among the allowed tokens, and where they ban all of these, one is drawn nevertheless."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._grammars: Grammars | None = None
        self._masks = MaskMaker(pin_memory=False)
        self._applied: HostMasks | DeviceMasks | None = None  # None: not opened
        self._progress: dict[int, Progress] = {}  # by slot

    def open(self, model_dir: Path | None, kernels: LogitKernels) -> None:
        """See :meth:`Feature.open`. Without files no request can be constrained."""
        if model_dir is None:
            return
        self._grammars = Grammars(model_dir, self.vocab_size)
        if self.device.type == "cpu":
            self._applied = HostMasks()
        else:
            self._applied = DeviceMasks(self.device, kernels.mask_logits)
            self._masks = MaskMaker(pin_memory=True, num_threads=min(_MAX_THREADS, available_cores()))

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`. Compiling a new grammar takes milliseconds, loading the tokenizer a second."""
        constraint = start.params.constraint
        assert constraint is not None and self._grammars is not None
        progress = self._progress[slot] = Progress(constraint, self._grammars)
        progress.advance(start.output_ids)

    def note_token(self, slot: int, token_id: int) -> None:
        """See :meth:`Feature.note_token`."""
        self._progress[slot].advance((token_id,))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        constrained = [draw for draw in rows.draws if self._matches(draw, rows)]
        if not constrained:
            return
        matchers = [matcher for draw in constrained if (matcher := self._progress[draw.slot].matcher) is not None]
        bits = self._masks.make(matchers, self.vocab_size)
        for index, draw in enumerate(constrained):
            progress = self._progress[draw.slot]
            progress.check()
            if progress.error:
                rows.errors[draw.row] = progress.error
                bits[index] = -1
        assert self._applied is not None
        self._applied.apply(logits, [draw.row for draw in constrained], bits)

    def _matches(self, draw: Draw, rows: Rows) -> bool:
        """Return whether the grammar has begun. Notes the error of one that has failed."""
        progress = self._progress[draw.slot]
        if progress.error:
            rows.errors[draw.row] = progress.error
        return progress.matcher is not None

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        del self._progress[slot]

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        progress = self._progress[slot]
        mask = None if progress.matcher is None else progress.matcher.compute_bitmask()
        return progress.position, mask
