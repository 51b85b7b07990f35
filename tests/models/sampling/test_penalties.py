"""The two forms of penalties give the same logits, bit for bit, whatever the batch."""

import random

import pytest
import torch

from splitserve.kernels.reference.sampling import penalise_logits
from splitserve.models.sampling.feature import Draw, Rows
from splitserve.models.sampling.features.penalties import DevicePenalties, HostPenalties
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart

VOCAB = 60
CPU = torch.device("cpu")
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

pytestmark = pytest.mark.usefixtures("one_thread")


def random_params(chance: random.Random) -> SamplingParams:
    chosen = {
        "repetition_penalty": chance.choice([0.5, 1.3]),
        "presence_penalty": chance.uniform(-2, 2),
        "frequency_penalty": chance.uniform(-2, 2),
    }
    names = chance.sample(sorted(chosen), chance.randint(1, 3))
    return SamplingParams(max_tokens=100, **{**NEUTRAL, **{name: chosen[name] for name in names}})


@pytest.mark.parametrize("columns", [VOCAB, VOCAB + 4], ids=["rows side by side", "rows apart"])
@pytest.mark.parametrize("seed", range(5))
def test_both_forms_agree(seed: int, columns: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    forms = (HostPenalties(VOCAB, CPU), DevicePenalties(VOCAB, CPU, penalise_logits))
    params = [random_params(chance) for _ in range(6)]
    for slot, each in enumerate(params):
        ids = [[chance.randrange(VOCAB) for _ in range(chance.randint(0, 90))] for _ in range(2)]
        for form in forms:
            form.begin(slot, FeatureStart(each, *ids))
    for step in range(80):
        slots = chance.sample(range(len(params)), chance.randint(1, len(params)))
        rows = [Draw(row, slot, params[slot], 0, step) for row, slot in enumerate(slots, 1)]
        raw = torch.randn((len(slots) + 2, columns), generator=generator)[:, :VOCAB]
        results = [raw.clone() if columns == VOCAB else _apart(raw) for _ in forms]
        drawn = torch.randint(-1, VOCAB, (len(raw),), generator=generator)
        for form, logits in zip(forms, results, strict=True):
            form.apply(logits, Rows(rows, CPU))
            form.advance(Rows(rows, CPU), drawn)
        assert torch.equal(*results)
        untouched = [0, len(raw) - 1]
        assert torch.equal(results[0][untouched], raw[untouched])


def _apart(logits: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows aren't adjacent in memory."""
    return torch.cat((logits, logits), dim=1)[:, :VOCAB]
