"""Every Triton kernel passes Triton's compiler, which runs without a GPU: other tests have its interpreter."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import splitserve.kernels

SCRIPT = Path(__file__).parents[1] / "support" / "kernel_launches.py"
KERNELS = Path(splitserve.kernels.__path__[0])

_EARLY_RETURN = """
import torch, triton
import triton.language as tl
from compiled_kernels import compiling

@triton.jit
def product(x_at, weight_at, FORMAT: tl.constexpr):
    if FORMAT == 2:
        return tl.load(x_at).to(tl.float32)
    return tl.dot(tl.load(x_at), tl.load(weight_at))

@triton.jit
def kernel(x, weight, out, FORMAT: tl.constexpr):
    inner = tl.arange(0, 16)
    at = inner[:, None] * 16 + inner[None, :]
    tl.store(out + at, product(x + at, weight + at, FORMAT))

x, weight, out = torch.zeros(256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.uint8), torch.zeros(256)
with compiling("ttir") as found:
    kernel[(1,)](x, x, out, FORMAT=1)
    assert found.kernels == {"__main__.kernel": 1} and not found.failures, found
    kernel[(1,)](x, weight, out, FORMAT=2)
print(found.failures)
"""


# Both programs in one process, which takes seconds to import what they need
_BOTH = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit:
        pass
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of both programs, one of each."""
    folder = tmp_path_factory.mktemp("compiled")
    early_return = folder / "early_return.py"
    early_return.write_text(_EARLY_RETURN)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    command = [sys.executable, "-c", _BOTH, str(SCRIPT), str(early_return)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr[-3000:]
    return lines


def launched_kernels() -> set[str]:
    """Return all functions under ``kernels/`` that are launched on a grid: their names end so."""
    return {
        ".".join(("splitserve.kernels", *path.relative_to(KERNELS).with_suffix("").parts, node.name))
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }


def test_every_kernel_compiles(said: list[str]) -> None:
    found = json.loads(said[0])
    assert found["failures"] == {}
    assert set(found["kernels"]) == launched_kernels()


def test_what_the_interpreter_accepts_is_refused(said: list[str]) -> None:
    """Code after a constant branch's early return is compiled, too."""
    assert "Both operands must be same dtype" in said[1]
