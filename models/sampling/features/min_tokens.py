"""``min_tokens``: neither end tokens nor stop tokens are drawn before the output has that many tokens."""

import numpy as np
from torch import Tensor

from splitserve.models.sampling.feature import BAN, Feature, Rows, entries


class MinTokens(Feature):
    """Bans the tokens that would end the output."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        stops = [
            [token_id for token_id in draw.params.stop_token_ids if token_id < self.vocab_size]
            if draw.num_output_tokens < draw.params.min_tokens
            else []
            for draw in rows.draws
        ]
        if any(stops):
            logits[entries(rows, [np.array(ids, dtype=np.int64) for ids in stops])] += BAN
