"""Judgement of an answer that differs from the quiet run's: a near-tie that rounding decided, or a wrong token.

The order in which a GPU adds depends on the batch, so two tokens whose scores are almost equal may swap. Each
token of the answer is compared with the float64 draw after the tokens before it.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from splitserve.benchmarks.chaos.load import Answer
from splitserve.kernels.reference.sampling import sample
from splitserve.kernels.sampling import SamplingBatch

NEAR_TIE_SHARES = {"float32": 1e-4, "bfloat16": 0.2}
"""Allowed error of each logit, as a share of its row's standard deviation. Measured on the tiny checkpoint against
float64, over 1,800 rows: at most 1.5e-5 in float32, 0.22 in bfloat16 with one logit in a thousand beyond 0.11."""


class Referee:
    """The checkpoint at ``path`` in float64 on ``device``, by transformers: of the code under test it uses only the
    draws' definition."""

    def __init__(
        self, path: str | Path, near_tie_share: float = NEAR_TIE_SHARES["float32"], device: str = "cpu"
    ) -> None:
        self._near_tie_share = near_tie_share
        self._device = device
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval().to(device)
        eos = self._model.generation_config.eos_token_id or ()
        self._eos_ids = {eos} if isinstance(eos, int) else set(eos)
        self._judged: dict[tuple[object, ...], str] = {}

    def problem(self, body: dict[str, Any], answer: Answer) -> str:
        """Describe why ``answer`` can't be an answer to ``body``, its case's, even with near-ties; "" if it can."""
        if answer.error:
            return f"failed: {answer.error}"
        if (answer.prompt_tokens, answer.completion_tokens) != (len(body["prompt"]), len(answer.token_ids)):
            return "its usage isn't that of its tokens"
        key = (answer.case, *answer.token_ids, answer.finish_reason)  # a storm repeats its answers
        if key not in self._judged:
            self._judged[key] = self._wrong_token(body, answer.token_ids) or self._wrong_end(body, answer)
        return self._judged[key]

    @torch.inference_mode()
    def _logits(self, body: dict[str, Any], token_ids: list[int]) -> Tensor:
        """Return the logits from which each of ``token_ids`` and the next token are drawn, float64 [tokens + 1,
        vocab]."""
        logits: Tensor = self._model(torch.tensor([body["prompt"] + token_ids], device=self._device)).logits[0]
        return logits[len(body["prompt"]) - 1 :]

    def _wrong_token(self, body: dict[str, Any], token_ids: list[int]) -> str:
        logits = self._logits(body, token_ids)
        drawn = _draw(logits[:-1], body, 0)
        for index, (token, expected) in enumerate(zip(token_ids, drawn, strict=True)):
            if token != expected and not self._is_near_tie(logits[index], body, index, token, expected):
                gap = float(logits[index, expected] - logits[index, token])
                return f"token {index} is {token} instead of {expected}, no near-tie: its logit is {gap:.3g} less"
        return ""

    def _wrong_end(self, body: dict[str, Any], answer: Answer) -> str:
        if answer.finish_reason == "length":
            missing = body["max_tokens"] - len(answer.token_ids)
            return f"it ended {missing} tokens early" if missing else ""
        if body.get("stop") or (answer.token_ids and answer.token_ids[-1] in self._eos_ids):
            return ""
        row, index = self._logits(body, answer.token_ids)[-1], len(answer.token_ids)
        [expected] = _draw(row[None], body, index)
        if expected in self._eos_ids or any(
            self._is_near_tie(row, body, index, token, expected) for token in self._eos_ids
        ):
            return ""
        return f"it ended after {index} tokens, where {expected} follows"

    def _is_near_tie(self, row: Tensor, body: dict[str, Any], index: int, token: int, expected: int) -> bool:
        """Return whether ``token`` is drawn instead of ``expected`` if both logits are off by :data:`NEAR_TIE_SHARES`.

        The draw is repeated, so a token at the threshold of top-k or top-p counts as well.
        """
        nudged, off = row.clone(), self._near_tie_share * float(row.std())
        nudged[token] += off
        nudged[expected] -= off
        return _draw(nudged[None], body, index) == [token]


def _draw(logits: Tensor, body: dict[str, Any], first: int) -> list[int]:
    """Draw tokens ``first`` and following of the answer, one from each row of ``logits``."""
    rows = range(logits.shape[0])
    batch = SamplingBatch(
        temperatures=[body["temperature"] for _ in rows],
        top_ks=[body.get("top_k", 0) for _ in rows],
        top_ps=[body.get("top_p", 1.0) for _ in rows],
        seeds=[body.get("seed", 0) for _ in rows],
        choices=[0 for _ in rows],
        positions=[len(body["prompt"]) + first + row for row in rows],
    )
    tokens: list[int] = sample(logits.clone(), batch).tolist()
    return tokens
