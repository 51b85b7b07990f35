"""The quickstart's commands, as they are on the page, but for the port; its installation is left out."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT, fenced

PAGE = ROOT / "docs" / "quickstart.md"

pytestmark = [
    pytest.mark.skipif(not PAGE.is_file(), reason="not a checkout"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_quickstart_works(tmp_path: Path) -> None:
    text = PAGE.read_text()
    install, *blocks = fenced(text, "sh")
    assert "scripts/setup" in install and not any("scripts/" in block for block in blocks)
    port = str(free_port())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SPLITSERVE_STATE_DIR": str(tmp_path / "state"),
    }

    def run(block: str) -> str:
        command = ["bash", "-euc", re.sub(r"\b8000\b", port, block)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    make, start, request, look, end = blocks
    run(make)
    try:
        assert f"http://127.0.0.1:{port}/v1" in run(start)
        route = json.loads(run(request))["splitserve"]
        assert route["mode"] == "disaggregated" and route["handover"]["blocks"] > 0
        assert "prefill-0" in run(look)
    finally:
        ended = run(end)
    assert "all processes have ended" in ended
