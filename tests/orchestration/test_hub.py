"""Models of the Hugging Face Hub, in a cache that the test makes in the hub's own layout; the Hub isn't reached."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.cli.options import cluster_spec
from splitserve.orchestration.spec.hub import NOT_THESE, SMALL_FILES, WEIGHTS
from splitserve.orchestration.spec.model_source import is_model_id

MODEL = "Some-Org/tiny.model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = """
import sys
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.cli.options import cluster_spec
from splitserve.orchestration.spec.hub import pinned, with_local_model
try:
    spec = cluster_spec(cli.build_parser().parse_args(sys.argv[1:]))
    local = with_local_model(spec)
    print(local.model.path, local.served_model_name, pinned(spec).model.path, sep="\\n")
except SplitserveError as error:
    print("refused:", error)
"""


def make_cached(home: Path, files: dict[str, bytes], commit: str = COMMIT, ref: str = "main") -> Path:
    """Write ``files`` into a cache below ``home``, as the hub's library lays it out; returns the snapshot."""
    root = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    for name, content in files.items():
        blob = root / "blobs" / f"blob-of-{name}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def resolve(home: Path, *arguments: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", _RESOLVE, "serve", *arguments, "--mixed", "1"]
    run = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=True, timeout=120)
    return run.stdout.strip()


def test_a_cached_model_is_found_by_its_id_and_revision(tmp_path):
    snapshot = make_cached(tmp_path, FILES)
    assert resolve(tmp_path, MODEL).splitlines() == [str(snapshot), MODEL, MODEL]
    tagged = make_cached(tmp_path, FILES, commit="f" * 40, ref="v2")
    answer = resolve(tmp_path, MODEL, "--revision", "v2", "--served-model-name", "mine")
    assert answer.splitlines()[:2] == [str(tagged), "mine"]


def test_what_isnt_cached_is_refused_with_the_command_that_downloads_it(tmp_path):
    refusal = resolve(tmp_path, MODEL, "--revision", "v3")
    command = f"hf download {MODEL} --revision v3 --include 'config.json'"
    assert refusal.startswith("refused:") and command in refusal and str(tmp_path / "hub") in refusal
    assert "HF_HUB_OFFLINE is set" in refusal
    # The command is one that the hub's own program takes.
    words = refusal[refusal.index("hf download") :].replace("'", "").split()
    dry = [str(Path(sys.executable).parent / "hf"), *words[1:], "--dry-run"]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(dry, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode != 0 and "No such option" not in run.stderr + run.stdout
    assert "ffline" in run.stderr + run.stdout or "outgoing traffic" in run.stderr + run.stdout


@pytest.mark.parametrize("lost", ["tokenizer.json", "model.safetensors"])
def test_a_snapshot_that_is_cached_in_part_is_refused(tmp_path, lost):
    make_cached(tmp_path, {name: content for name, content in FILES.items() if name != lost})
    refusal = resolve(tmp_path, MODEL)
    assert refusal.startswith("refused:") and "partly in this machine's cache" in refusal and "hf download" in refusal
    if lost == "model.safetensors":
        assert resolve(tmp_path, MODEL, "--load-format", "dummy").splitlines()[1] == MODEL


def test_a_directory_of_that_name_wins_and_paths_are_no_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_model_id(MODEL) and is_model_id("a/b")
    (tmp_path / MODEL).mkdir(parents=True)
    assert not is_model_id(MODEL)
    for path in ("/a/b", "./a", "../b", "a", "a/b/c", "a/", "a b/c", "~/b", "a/../b", "-a/b", ""):
        assert not is_model_id(path), path


def test_only_what_is_read_is_downloaded():
    """The command line of the refusal and the download have the same patterns, and each kind of file in them."""
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} < {*SMALL_FILES}
    assert WEIGHTS == "*.safetensors" and "*/*" in NOT_THESE


def test_the_id_travels_in_the_spec_not_a_path():
    options = cli.build_parser().parse_args(["serve", "Some-Org/other", "--revision", "r", "--mixed", "1"])
    spec = cluster_spec(options)
    assert msgspec.to_builtins(spec)["model"] == {"path": "Some-Org/other", "revision": "r"}
    assert spec.served_model_name == "Some-Org/other"
