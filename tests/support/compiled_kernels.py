"""Triton's compiler without a GPU: launches compile their kernel for CUDA compute capability 9.0, and run nothing.

Triton's interpreter accepts programs that its compiler refuses, such as code after an early return in a branch that a
constant decides. Here the real launchers compile what they would launch on a GPU, with the types, alignments and
constants of their arguments, which are on the CPU. Results are never computed: outputs hold anything.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MAX_SHARED_BYTES = 227 << 10  # of a program, at compute capability 9.0


class _Compiler:
    """Stand-in for the driver of a GPU: there is something to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass(slots=True)
class Compiled:
    """The compiled kernels. ``failures``: the kernels that the compiler refused, with its reason."""

    kernels: dict[str, int] = field(default_factory=dict)  # variants of each
    failures: dict[str, str] = field(default_factory=dict)


class _Kernel:
    """A compiled kernel that is never loaded. ``shared``: its bytes of shared memory; 0 before they are known."""

    def __init__(self, _source: Any, group: dict[str, str], _hash: str) -> None:
        path = next(Path(path) for name, path in group.items() if name.endswith(".json"))
        self.shared = int(json.loads(path.read_text()).get("shared", 0))


@contextmanager
def compiling(last_stage: str = "ptx") -> Iterator[Compiled]:
    """Compile what is launched meanwhile, up to ``last_stage``: ttir, ttgir, llir or ptx."""
    found = Compiled()
    kept: list[_Kernel] = []
    real = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        if "OVERLAPPED" in kwargs:  # as on a GPU of that capability
            kwargs |= {"OVERLAPPED": True, "launch_pdl": True}
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        constants = {key: value for key, value in kwargs.items() if isinstance(value, int | float | str)}
        try:
            kernel = real(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            found.failures.setdefault(f"{name} {constants}", _last_reason(error))
            return None
        if not any(kernel is other for other in kept):
            kept.append(kernel)
            found.kernels[name] = found.kernels.get(name, 0) + 1
            if kernel.shared > MAX_SHARED_BYTES:
                found.failures[f"{name} {constants}"] = f"needs {kernel.shared} bytes of shared memory"
        return kernel

    driver.set_active(_Compiler())  # type: ignore[no-untyped-call]
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(CUDABackend, "add_stages", _stages_until(last_stage)),
        mock.patch("triton.compiler.compiler.CompiledKernel", _Kernel),
    ):
        yield found


def _stages_until(last: str) -> Any:
    """Return a function that makes the compiler end after the stage ``last``."""
    real = CUDABackend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *args: Any) -> None:
        real(self, stages, *args)
        names = list(stages)
        kept = names.index(last) if last in names else 0  # Gluon has no ttir
        for name in names[kept + 1 :]:
            del stages[name]

    return add_stages


def _last_reason(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[-1] if isinstance(error, triton.CompilationError) else lines[0]}"
