"""Downloads from a Hub on loopback, and its refusals in words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from local_hub import COMMIT, LocalHub, running

MODEL = "Some-Org/served.model"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"weights" * 1000,
    "README.md": b"not needed",
    "onnx/model.onnx": b"not needed",
    "consolidated.safetensors": b"not needed",
}
_RESOLVE = """
import sys
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.spec.hub import download
try:
    print(download(*sys.argv[1:]))
except SplitserveError as error:
    print("refused:", error)
"""


def resolve(hub: LocalHub, home: Path, *arguments: str, token: str = "", prefix: tuple[str, ...] = ()) -> str:
    """Download in a process with a cache of its own; returns its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    environment |= {"HF_TOKEN": token} if token else {}
    command = [*prefix, sys.executable, "-c", _RESOLVE, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_only_the_files_that_are_read_are_downloaded_once(tmp_path):
    with running(LocalHub(MODEL, FILES)) as hub:
        snapshot = Path(resolve(hub, tmp_path, MODEL))
        wanted = {"config.json", "tokenizer.json", "model.safetensors"}
        assert snapshot.name == COMMIT and {path.name for path in snapshot.iterdir()} == wanted
        assert sorted(hub.fetched) == sorted(wanted)
        assert resolve(hub, tmp_path, MODEL) == str(snapshot) and len(hub.fetched) == len(wanted)
        assert Path(resolve(hub, tmp_path / "other", MODEL)) != snapshot and len(hub.fetched) == 2 * len(wanted)


@pytest.mark.parametrize("token", ["", "hf_ofanotheraccount"])
def test_a_gated_model_needs_a_token_of_an_account_with_access(tmp_path, token):
    with running(LocalHub(MODEL, FILES, gated=True, token="hf_right")) as hub:
        refusal = resolve(hub, tmp_path, MODEL, token=token)
        assert refusal.startswith(f"refused: the model {MODEL} is gated: ") and f"{hub.url}/{MODEL}" in refusal
        assert "HF_TOKEN" in refusal and f"hf download {MODEL} --include" in refusal
        assert resolve(hub, tmp_path, MODEL, token="hf_right").endswith(COMMIT)


def test_a_revision_or_a_model_that_does_not_exist(tmp_path):
    with running(LocalHub(MODEL, FILES)) as hub:
        refusal = resolve(hub, tmp_path, MODEL, "v9")
        assert refusal.startswith(f"refused: the model {MODEL} has no revision 'v9'")
        assert f"{hub.url}/{MODEL}" in refusal and f"hf download {MODEL} --include" in refusal
        refusal = resolve(hub, tmp_path, "Some-Org/nothing")
        assert refusal.startswith("refused: there is neither a directory Some-Org/nothing here nor a model of that id")


def test_a_hub_that_does_not_answer_is_named(tmp_path):
    hub = LocalHub(MODEL, FILES)
    hub.url = "http://127.0.0.1:9"
    refusal = resolve(hub, tmp_path, MODEL)
    assert refusal.startswith("refused:") and "can't be reached" in refusal and f"hf download {MODEL}" in refusal


def test_a_full_disk_is_named_with_the_command_and_the_way_out(tmp_path):
    """The cache is on a file system of 64 KiB, in a mount namespace of the download."""
    script = 'mount -t tmpfs -o size=64k none "$HF_HOME" && exec "$@"'
    mounted = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    trial = subprocess.run([*mounted, "true"], env={**os.environ, "HF_HOME": str(tmp_path)}, check=False)
    if trial.returncode != 0:
        pytest.skip("this machine has no mount namespaces for users")
    with running(LocalHub(MODEL, FILES | {"model.safetensors": bytes(1 << 20)})) as hub:
        refusal = resolve(hub, tmp_path, MODEL, prefix=mounted)
    assert refusal.startswith(f"refused: no space left in the cache {tmp_path}/hub"), refusal
    assert "HF_HOME" in refusal and f"hf download {MODEL} --include" in refusal
