"""The guide "Add a cache tier", followed to the letter in a copy of this checkout."""

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from documents import ROOT
from followed_guide import FollowedGuide
from serving import wait_until_quiet
from small_clusters import BLOCK_SIZE
from tier_chats import NUM_USERS, SMALL_POOL, chat
from waiting import PATIENCE_SECONDS

GUIDE = "add-a-cache-tier.md"

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


def test_a_tier_of_the_guide_holds_chats(tmp_path: Path, tiny_qwen3: Path, chat_tokens: list[list[list[int]]]) -> None:
    guide = FollowedGuide(GUIDE, tmp_path)
    file_text, entry, setting = guide.blocks("python")
    guide.write(guide.find(r"This is `(kvconnector/tiers/\w+\.py)`"), file_text)
    guide.add_line(guide.find(r"line to `TIERS` in `([\w/.]+)`"), "TIERS", entry)
    guide.add_line(
        guide.find(r"in `EngineConfig` in `([\w/.]+)`, before `host_kv_memory_bytes`"),
        "    host_kv_memory_bytes: ",
        setting,
        before=True,
    )
    assert len(guide.touched) <= 2
    (shown,) = guide.blocks("text")
    document = yaml.safe_load(shown)
    document["model"]["path"] = str(tiny_qwen3)
    document["model"]["max_model_len"] = 512
    document["pools"][0]["dtype"] = "float32"
    document["pools"][0]["memory"]["kv"] = SMALL_POOL  # less than the chats need
    document["engine"]["block_size"] = BLOCK_SIZE
    document["engine"]["compressed_kv_bytes"] = 64 << 20
    document["router"] = {"port": 0}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(document))
    with serving(guide, tmp_path / "spec.yaml") as url:
        answers, _ = chat(url, tiny_qwen3)
        assert answers == chat_tokens
        (load,) = wait_until_quiet(url).values()
        with urllib.request.urlopen(f"{url}/metrics") as page:
            text = page.read().decode()
    assert load["tier_failures_total"] == 0
    lines = re.findall(r'^splitserve_tier_(\w+)\{.*tier="compressed".*\} (\S+)$', text, re.MULTILINE)
    counts = {name: float(value) for name, value in lines}
    assert counts["hits_total"] == counts["loaded_blocks_total"] > NUM_USERS


@contextmanager
def serving(guide: FollowedGuide, spec: Path) -> Iterator[str]:
    """A cluster that runs the copy's code; its URL."""
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "serve", "--spec", str(spec)]
    with subprocess.Popen(
        [*command, "--log-level", "warning"],
        cwd=guide.checkout,
        env=guide.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if line.startswith("Ready: ")), "")
            assert ready, "the cluster ended"
            yield ready.split()[1].removesuffix("/v1")
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()
