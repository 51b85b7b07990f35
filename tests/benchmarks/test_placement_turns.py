"""The case ``turns`` of the placement bench, on real workers and with small sizes."""

import pytest

from splitserve.benchmarks.placement import blind_router, turns
from splitserve.protocol.config import RouterConfig
from splitserve.router import server
from splitserve.router.placement.prefix_view import PromptHashes

ROOT = b"r" * 16


@pytest.mark.slow
def test_all_arms_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "SHAPE": "tiny",
        "KV_BYTES": 32 << 20,
        "FIRST_TOKENS": 96,
        "NEW_TOKENS": 20,
        "OUTPUT_TOKENS": 24,
        "NUM_TURNS": 3,
        "WARM_UPS": 1,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(turns, name, size)
    rows = {row["arm"]: row for row in turns.turns(2)}
    assert list(rows) == list(turns.ARMS)
    for name, row in rows.items():
        assert row["requests"] == 6 and row["same_answers"], row
        assert row["ttft_p50_ms"] > 0 and row["stages_ms"]["prefill"] > 0
        assert name == "default" or row["local_share"] == 0
        assert name != "always, no output hashes" or row["read_blocks"] == 0


def test_the_blind_router_knows_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[RouterConfig] = []
    monkeypatch.setattr(server, "run_router", lambda config, progress: served.append(config))
    monkeypatch.setattr(PromptHashes, "extended", PromptHashes.extended)  # undone at the end
    config = RouterConfig(model="m", served_model_name="m")
    blind_router.run_router(config, lambda *_: None)
    hashes = PromptHashes(range(64))
    assert served == [config]
    assert hashes.extended(range(64)).chain(ROOT, 16) == hashes.chain(ROOT, 16)
