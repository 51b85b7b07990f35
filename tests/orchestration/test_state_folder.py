"""The state folder of a cluster: records that can't be read, and looks of other commands during a claim."""

import fcntl
import threading
from pathlib import Path

import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.control import state_folder
from splitserve.orchestration.control.state_folder import Record, StateFolder, choose_cluster
from splitserve.orchestration.doctor.machine import look_at_machine
from waiting import PATIENCE_SECONDS

UNREADABLE = ["", "garbage", '{"name": "prod", "ray": "10.0.0.1:6379", "added_later": 1}']


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def left_behind(content: str) -> Path:
    """The record with this content of a cluster called prod whose launcher doesn't live."""
    folder = StateFolder("prod")
    folder.claim()
    record = folder.path / "cluster.json"
    record.write_text(content)
    folder.release()
    return record


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_record_that_cannot_be_read_is_no_sign_that_nothing_runs(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = left_behind(content)
    for arguments in (["down"], ["down", "--name", "prod"], ["status"], ["logs"]):
        assert cli.main(arguments) == 2
        said = capsys.readouterr().err
        assert f"{record}, the record of cluster prod, can't be read" in said and "--forget" in said
    assert record.read_text() == content
    assert not look_at_machine().dead_clusters, "the doctor doesn't advise to remove it"


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_name_whose_record_cannot_be_read_is_not_claimed_until_it_is_forgotten(content: str) -> None:
    record = left_behind(content)
    folder = StateFolder("prod")
    with pytest.raises(ConfigError, match="the record of cluster prod, can't be read"):
        folder.claim()
    assert record.exists() and not folder.is_claimed()
    assert cli.main(["down", "--name", "prod", "--forget"]) == 0
    folder.claim()
    folder.remove()


def test_a_full_disk(capsys: pytest.CaptureFixture[str], tiny_qwen3: Path, state: Path) -> None:
    """It is named before a process starts, and nothing is left behind that looks like a cluster."""
    folder = StateFolder("prod")
    folder.claim()
    (folder.path / "cluster.json.new").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"can't keep the cluster's state in .*/prod: No space left on device"):
        folder.write(Record(name="prod"))
    folder.discard()
    assert not list(folder.path.iterdir())
    folder.logs.mkdir()
    (folder.logs / "launcher.log").symlink_to(state / "no" / "folder")
    assert cli.main(["up", str(tiny_qwen3), "--mixed", "1", "--port", "0", "--name", "prod"]) == 2
    assert "can't keep the cluster's state in" in capsys.readouterr().err


def test_a_living_launcher_needs_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    folder = StateFolder("prod")
    folder.claim()
    (folder.path / "cluster.json").write_text("garbage")
    assert choose_cluster("").name == "prod"
    assert cli.main(["status"]) == 2
    assert "the cluster doesn't answer at" in capsys.readouterr().err
    folder.remove()


def test_a_look_at_a_folder_is_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_claimed` holds a shared lock for a moment; here it is a long one."""
    monkeypatch.setattr(state_folder, "CLAIM_SECONDS", PATIENCE_SECONDS)
    folder = StateFolder("c")
    folder.path.mkdir(parents=True)
    with (folder.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        end_of_look = threading.Timer(0.05, fcntl.flock, (lock, fcntl.LOCK_UN))
        end_of_look.start()
        folder.claim()
        end_of_look.join()
    folder.remove()
