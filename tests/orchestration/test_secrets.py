"""Secrets of a cluster: what is none is refused where it is read, by a message that doesn't show it."""

from pathlib import Path

import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.document import parse_spec
from splitserve.orchestration.spec.expansion import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, read_secret, resolve_secrets
from splitserve.orchestration.spec.start_checks import file_problems

POOLS = "model: {path: m}\npools: [{name: a, role: mixed}]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schlüssel", "characters beyond ASCII"),
        ("one\ntwo", "more than one line, or control characters"),
        ("tab\tbed", "more than one line, or control characters"),
    ],
)
def test_a_secret_that_no_header_carries_is_refused_unseen(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv(API_KEY_VARIABLE, text)
    for given, source in ((str(path), str(path)), ("", API_KEY_VARIABLE)):
        with pytest.raises(ConfigError, match=words) as raised:
            read_secret(given, API_KEY_VARIABLE)
        assert source in str(raised.value) and text not in str(raised.value)


def test_spaces_around_a_secret_are_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" a key\n")
    assert read_secret(str(tmp_path / "key"), "") == "a key"


def test_the_admin_key_is_another_one_than_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(POOLS)
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "key")
    with pytest.raises(ConfigError, match="are the same"):
        resolve_secrets(spec)
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "another")
    assert resolve_secrets(spec).admin_key == "another"


def test_a_short_shared_secret_is_named_by_its_own_option(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("abcde")
    spec = parse_spec(f"{POOLS}secrets: {{shared: {{file: {tmp_path / 'secret'}}}}}\n")
    problem = ("secrets.shared.file", "the shared secret has 5 characters; use at least 16")
    assert problem in file_problems(spec)
