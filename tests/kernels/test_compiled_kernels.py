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


def run(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def launched_kernels() -> set[str]:
    """Return all functions under ``kernels/`` that are launched on a grid: their names end so."""
    return {
        ".".join(("splitserve.kernels", *path.relative_to(KERNELS).with_suffix("").parts, node.name))
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }


def test_every_kernel_compiles(tmp_path: Path) -> None:
    done = run(tmp_path, str(SCRIPT))
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["failures"] == {}
    assert set(found["kernels"]) == launched_kernels()


def test_what_the_interpreter_accepts_is_refused(tmp_path: Path) -> None:
    """Code after a constant branch's early return is compiled, too."""
    script = tmp_path / "early_return.py"
    script.write_text(_EARLY_RETURN)
    done = run(tmp_path, str(script))
    assert "Both operands must be same dtype" in done.stdout, done.stderr[-3000:]
