"""The guide "Add a sampling feature", followed to the letter in a copy of this checkout."""

import json
import re
from pathlib import Path
from textwrap import indent

import pytest

from documents import ROOT
from followed_guide import FollowedGuide

GUIDE = "add-a-sampling-feature.md"
CUTOFF = 0.05
PROBABILITIES = [0.5, 0.3, 0.14, 0.04, 0.02]

# Draws with the feature: how often each token came, in a vocabulary of five whose probabilities are known. A grammar
# leaves logits of -1e30.
COUNTED = """
import collections, json, sys, torch
from splitserve.kernels.reference.sampling import sample
from splitserve.models.sampling import sampler
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan
assert sampler.__file__.startswith(sys.argv[1]), sampler.__file__
name, value, allowed, probabilities = sys.argv[2], float(sys.argv[3]), *map(json.loads, sys.argv[4:])
params = SamplingParams(max_tokens=1, allowed_token_ids=tuple(allowed), **{name: value})
drawing = sampler.Sampler(sample, 5, torch.device("cpu"))
use = lambda number: FeatureUse(number, FeatureStart(params, [0], []))
chunks = [ScheduledChunk([0], 0, [0], SampleSpec(1.0, 0, 1.0, n, 0, 1, use(n))) for n in range(2000)]
plan = StepPlan(chunks)
drawing.prepare(plan)
logits = torch.tensor(probabilities).log().clamp(min=-1e30).repeat(len(chunks), 1)
print(json.dumps(collections.Counter(drawing.draw(logits, chunks).tolist())))
"""
REFUSED = """
import json, sys
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.parsing import parse
from splitserve.router.http.schema import CompletionRequest
name = sys.argv[1]
def outcome(value):
    try:
        return getattr(parse(CompletionRequest, json.dumps({"model": "m", "prompt": "a", name: value}).encode()), name)
    except ApiError as error:
        return [error.status, error.body()["error"]["param"]]
print(json.dumps([outcome(value) for value in (None, 0, 0.5, 1, -0.1, "a")]))
"""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


def test_a_feature_of_the_guide_changes_draws(tmp_path: Path) -> None:
    guide = FollowedGuide(GUIDE, tmp_path)
    parameter, file_text, line = guide.blocks("python")
    declarations = guide.find(r"fields of `FeatureParams` in `([\w/.]+)`")
    guide.add_line(declarations, "    min_p: Annotated[", indent(parameter, "    "), before=True)
    guide.write(guide.find(r"This is `(models/sampling/features/\w+\.py)`"), file_text)
    before = guide.find(r"line to `SAMPLING_FEATURES` in the file of the parameters, right before `(\w+)`")
    guide.add_line(declarations, f'    "{before}": ', line, before=True)
    assert guide.touched == {declarations}
    (name,) = re.findall(r"^(\w+): Annotated", parameter)
    specification = guide.checkout / guide.find(r"row `SamplingParams` in `([\w/.]+)`")
    row = specification.read_text()
    specification.write_text(row.replace("| `max_tokens`, ", f"| `max_tokens`, `{name}`, ", 1))
    guide.python("-m", "ruff", "check", "--no-cache", declarations, "models/sampling/features")
    guide.python("-m", "ruff", "format", "--no-cache", "--check", declarations, "models/sampling/features")

    def counted(cutoff: float, allowed: list[int], probabilities: list[float]) -> dict[str, int]:
        values = (str(cutoff), json.dumps(allowed), json.dumps(probabilities))
        counts: dict[str, int] = json.loads(guide.python("-c", COUNTED, str(guide.checkout), name, *values))
        return counts

    counts = counted(CUTOFF, [], PROBABILITIES)
    assert set(counts) == {"0", "1", "2"}, "probabilities of 0.5, 0.3, 0.14 and two below the cutoff"
    assert counts["2"] > 200
    assert set(counted(0.9, [3, 4], PROBABILITIES)) == {"3"}, "the most probable one of the allowed tokens"
    assert set(counted(0.9, [2, 3], [0.0, 0.0, 0.0, 0.0, 1.0])) == {"4"}, "the grammar's only token isn't allowed"
    refused = [400, name]
    assert json.loads(guide.python("-c", REFUSED, name)) == [None, 0, 0.5, refused, refused, refused]
    guide.python("scripts/reference_pages.py")
    assert f"`{name}`" in (guide.checkout / "docs/reference/http-api.md").read_text()

    (command,) = guide.blocks("console")
    passed = guide.tests_passed(command, "-k", "epsilon or every_parameter or parts_of_messages")
    assert ("test_tokens_depend_on_nothing_but_the_request_and_its_output", "0.9-epsilon") in passed
