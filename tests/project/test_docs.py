"""The documentation: its links, its commands and specs, its generated pages, and the site that is built of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from documents import GENERATED, PAGES, ROOT, all_options, check_command, fenced, load_script, splitserve_commands
from splitserve.orchestration.spec.document import parse_spec

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
OTHERS_OPTIONS = {"--l2-adapter", "--port", "--numprocesses", "--build-arg"}  # of LMCache, Ray, pytest, Docker

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="not a checkout")


def test_reference_pages_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    pages = load_script("reference_pages")
    assert pages.main(["--check"]) == 0, "run python scripts/reference_pages.py"
    assert {path.name for path in pages.pages() if path.suffix != ".py"} == GENERATED
    assert not capsys.readouterr().out


def test_reference_pages_follow_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = load_script("reference_pages")
    monkeypatch.setattr(pages, "TOOLS", {"tune": ("", "something else")})
    assert pages.main(["--check"]) == 1


@pytest.mark.parametrize("path", [*PAGES, ROOT / "ARCHITECTURE.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", path.read_text())
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_accepted(path: Path) -> None:
    for arguments in splitserve_commands(path.read_text()):
        check_command(arguments)


def test_commands_are_found() -> None:
    """The test above would pass without any."""
    found = {path.name: len(list(splitserve_commands(path.read_text()))) for path in PAGES}
    assert found["README.md"] >= 5 and found["quickstart.md"] >= 5 and found["operations.md"] >= 6


def test_options_in_the_text_exist() -> None:
    known = all_options() | OTHERS_OPTIONS
    for path in PAGES:
        named = set(re.findall(r"`(--[a-z][\w-]*)[^`]*`", path.read_text()))
        assert named <= known, path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cluster_specs_are_accepted(path: Path) -> None:
    for text in fenced(path.read_text(), "yaml"):
        parse_spec(text if "model:" in text else f"model: {{path: m}}\n{text}", path.name)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_each_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions" / "000-index.md").read_text()
    pages = {path.name for path in (DOCS / "decisions").glob("[0-9]*.md")} - {"000-index.md"}
    assert pages and set(re.findall(r"\]\((\d{3}-[\w-]+\.md)\)", index)) == pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    """Links may lead elsewhere; scripts, styles, fonts and pictures may not. Mermaid's script would come from a CDN."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 20
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//"""
    )
    for page in pages:
        text = page.read_text()
        assert not loaded.search(text), page
        assert 'class="mermaid"' not in text, page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style


def test_the_site_has_each_page(site: Path) -> None:
    for path in DOCS.rglob("*.md"):
        assert (site / path.relative_to(DOCS)).with_suffix(".html").is_file()
