"""LMCache's own virtual environment, beside ours.

LMCache pins numpy, prometheus_client, OpenTelemetry and protobuf to old versions, and its whole list of requirements
takes gigabytes (CuPy and clients of several clouds). The requirements of its server for shared memory, files and Redis
are listed here. It finds PyTorch and other packages of our environment through a ``.pth`` file, after its own packages,
so that the versions that it pins win.
"""

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from splitserve.common.errors import ConfigError

LMCACHE_VERSION = "0.5.6"
"""LMCache version that our client is made for and tested with."""

REQUIREMENTS = (
    f"lmcache=={LMCACHE_VERSION}",
    # Packages that LMCache's metadata pins below our versions.
    "numpy==2.2.6",
    "prometheus_client==0.24.1",
    "opentelemetry-api==1.40.0",
    "opentelemetry-sdk==1.40.0",
    "opentelemetry-semantic-conventions==0.61b0",
    "opentelemetry-exporter-prometheus==0.61b0",
    "importlib-metadata==8.7.1",
    "zipp==3.23.0",
    # Packages that our environment lacks.
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "blake3==1.0.11",
    "cachetools==8.0.1",
    "caio==0.12.10",
    "certifi==2026.10.18",
    "cffi==2.1.1",
    "charset-normalizer==3.5.2",
    "cryptography==50.0.2",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "llvmlite==0.50.0",
    "numba==0.68.1",
    "py-cpuinfo==9.0.0",
    "pycparser==3.0",
    "requests==2.34.2",
    "sortedcontainers==2.4.0",
    "urllib3==2.8.0",
)
_STAMP = ".splitserve-lmcache"
_HOW_TO_MAKE = "make it with `splitserve lmcache --install`"


def default_environment() -> Path:
    """Return the environment beside our own: ``.venv-lmcache`` for ``.venv``. Outside a virtual environment: below
    Python's installation directory."""
    prefix = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        return prefix / "lmcache"
    return prefix.with_name(f"{prefix.name}-lmcache")


def interpreter(environment: str = "") -> Path:
    """Return the Python of the environment. Raises :class:`ConfigError` if there is no LMCache in it, or another
    version."""
    folder = Path(environment) if environment else default_environment()
    python = folder / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"LMCache's environment isn't at {folder}: {_HOW_TO_MAKE}, or give its location")
    code = "import importlib.metadata; print(importlib.metadata.version('lmcache'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"there is no LMCache in {folder}: {_HOW_TO_MAKE}")
    if found.stdout.strip() != LMCACHE_VERSION:
        raise ConfigError(f"{folder} has LMCache {found.stdout.strip()}; this version works with {LMCACHE_VERSION}")
    return python


def install(environment: str = "") -> Path:
    """Create or repair the environment; returns its directory. Returns quickly if it is complete already.

    Raises :class:`ConfigError` with pip's own message.
    """
    folder = Path(environment) if environment else default_environment()
    shared = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    fingerprint = hashlib.sha256(repr((REQUIREMENTS, sys.version_info[:2], list(shared))).encode()).hexdigest()
    stamp = folder / _STAMP
    python = folder / "bin" / "python"
    if python.exists() and stamp.exists() and stamp.read_text() == fingerprint:
        return folder
    stamp.unlink(missing_ok=True)
    venv.EnvBuilder(with_pip=False, clear=folder.exists()).create(folder)
    _pip(python)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "zz-splitserve-shared.pth").write_text("".join(f"{path}\n" for path in shared))
    stamp.write_text(fingerprint)
    return folder


def _pip(python: Path) -> None:
    """Install exactly the listed packages into the other environment, with our own pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = subprocess.run(
        [*command, "install", "--quiet", "--no-deps", *REQUIREMENTS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"LMCache's environment can't be created: pip reports: {words[-1]}")
