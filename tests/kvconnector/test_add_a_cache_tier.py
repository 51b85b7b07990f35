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

# The tier's size by option and by spec, a size that can't be parsed, and one that the machine doesn't have.
CHECKED = """
import sys
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli import main
from splitserve.orchestration.cli.options import cluster_spec
from splitserve.orchestration.spec.document import parse_spec
from splitserve.orchestration.spec.start_checks import Machine, capacity_problems
assert main.__file__.startswith(sys.argv[1]), main.__file__
machine = Machine(4, 8 << 30, ())
options = main.build_parser().parse_args(["serve", sys.argv[2], "--kv-memory", "1GiB", "--compressed-kv", "4GiB"])
text = f"model: {{path: {sys.argv[2]}}}\\npools: [{{name: a, role: mixed, memory: {{kv: 1GiB, compressed: SIZE}}}}]"
for spec in (cluster_spec(options), parse_spec(text.replace("SIZE", "4GiB"), "spec")):
    print(spec.engine_config(spec.pools[0]).compressed_kv_bytes, capacity_problems(spec, machine))
print([location for location, _ in capacity_problems(parse_spec(text.replace("SIZE", "8GiB"), "spec"), machine)])
try:
    parse_spec(text.replace("SIZE", "4 apples"), "spec")
except ConfigError as error:
    print(str(error).partition(";")[0])
"""
EXPECTED = """4294967296 []
4294967296 []
['pools[0].memory.compressed']
spec:2: pools[0].memory.compressed: '4 apples' is not an amount of memory
"""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


def test_a_tier_of_the_guide_holds_chats(tmp_path: Path, tiny_qwen3: Path, chat_tokens: list[list[list[int]]]) -> None:
    guide = FollowedGuide(GUIDE, tmp_path)
    file_text, entry, setting, field, taker = guide.blocks("python")
    guide.write(guide.find(r"This is `(kvconnector/tiers/\w+\.py)`"), file_text)
    guide.add_line(guide.find(r"line to `TIERS` in `([\w/.]+)`"), "TIERS", entry)
    guide.add_line(
        guide.find(r"in `EngineConfig` in `([\w/.]+)`, before `host_kv_memory_bytes`"),
        "    host_kv_memory_bytes: ",
        setting,
        before=True,
    )
    guide.add_line(
        guide.find(r"to `MemorySpec` in `([\w/.]+)`, before `host`"), "    host: Annotated[int", field, before=True
    )
    add_to_sizes(guide.checkout / guide.find(r"in `_pool_problems` in `([\w/.]+)`"))
    guide.add_line(
        guide.find(r"to `_host_memory_problems` in `([\w/.]+)`"), '        takers[f"pools[{index}].memory.host"]', taker
    )
    changed = (*sorted(guide.touched), "orchestration/spec/contradictions.py", "kvconnector/tiers")
    guide.python("-m", "ruff", "check", "--no-cache", *changed)
    guide.python("-m", "ruff", "format", "--no-cache", "--check", *changed)
    assert guide.python("-c", CHECKED, str(guide.checkout), str(tiny_qwen3)) == EXPECTED
    (shown,) = guide.blocks("text")
    document = yaml.safe_load(shown)
    document["model"]["path"] = str(tiny_qwen3)
    document["model"]["max_model_len"] = 512
    document["pools"][0]["dtype"] = "float32"
    document["pools"][0]["memory"]["kv"] = SMALL_POOL  # less than the chats need
    document["engine"] = {"block_size": BLOCK_SIZE}
    document["pools"][0]["memory"]["compressed"] = "64MiB"
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


def add_to_sizes(file: Path) -> None:
    text = file.read_text()
    assert text.count('("kv", "host", "disk")') == 1
    file.write_text(text.replace('("kv", "host", "disk")', '("kv", "compressed", "host", "disk")'))


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
