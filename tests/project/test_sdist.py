"""The source distribution: everything that git has, and the same package again."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "src/splitserve"

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")


def build(source: Path, target: Path, kind: str) -> Path:
    """With the build backend, as ``pip wheel --no-build-isolation`` calls it."""
    target.mkdir()
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = target.iterdir()
    return path


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_it_has_every_tracked_file_and_gives_the_same_wheel(tmp_path: Path) -> None:
    files = tracked()
    tree = tmp_path / "tree"
    for name in files:  # building writes into the source's folder
        copy = tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        else:
            copy.write_bytes((ROOT / name).read_bytes())
    with tarfile.open(build(tree, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    folders = {path.name for path in (tree / PACKAGE).iterdir() if path.is_symlink()}
    links = {f"{PACKAGE}/{folder}" for folder in folders}
    expected = {f"{PACKAGE}/{name}" if name.split("/")[0] in folders else name for name in files - links}
    missing = {name for name in expected if not (unpacked / name).is_file()}
    assert not missing
    wheels = [build(tree, tmp_path / "wheel", "wheel"), build(unpacked, tmp_path / "again", "wheel")]
    contents = [{info.filename: info.CRC for info in zipfile.ZipFile(wheel).infolist()} for wheel in wheels]
    for content in contents:
        content.pop(next(name for name in content if name.endswith(".dist-info/RECORD")))
    assert contents[0] == contents[1]
    assert any(name.startswith("splitserve/kernels/configs/") for name in contents[0])
