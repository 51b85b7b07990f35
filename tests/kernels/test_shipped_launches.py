"""Launch parameters in ``kernels/configs``: names, types, ranges, and what a program takes of a device's shared memory.

The kernels themselves say at their first launch on a GPU that a parameter can't be; this finds it without one.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from splitserve.kernels.experts.launch import MAX_STREAMED, ExpertLaunch
from splitserve.kernels.experts.triton.streamed import ROWS_OF_WARP
from splitserve.kernels.triton.linear import MAX_ROWS
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.decode_launch import MAX_PARTS, DecodeLaunch
from splitserve.kernels.tuning.linear_launch import CUBLAS, LinearLaunch, default_params
from splitserve.kernels.tuning.tunables import OPERATIONS

SHARED_BYTES = {
    "NVIDIA H100 80GB HBM3": 227 << 10,
    "NVIDIA H200": 227 << 10,
}  # of one program, by CUDA's programming guide for compute capability 9.0
HAS_TMA = set(SHARED_BYTES)
PACKED = "uint8"  # MXFP4
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, PACKED: 2}  # PACKED: of its vectors
WORKSPACE_ELEMENTS, WORKSPACE_TILES = 1 << 23, 1 << 16  # of products in parts
MAX_THREAD_ELEMENTS = 128  # of a row kernel's weights, in registers
SIZES = {
    "attention_decode": ("heads", "kv_heads", "head_dim", "block_size"),
    "experts": ("experts", "top_k", "hidden", "inner"),
    **dict.fromkeys((name for name in OPERATIONS if name.startswith("linear_")), ("n", "k")),
}
DEFAULTS: dict[str, Any] = {
    "attention_decode": DecodeLaunch(1),
    "experts": ExpertLaunch(),
    **dict.fromkeys((name for name in OPERATIONS if name.startswith("linear_")), LinearLaunch()),
}
PATHS = sorted(tuning.SHIPPED_DIRECTORY.glob("*.json"))


def is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def attention_problems(launch: DecodeLaunch, sizes: dict[str, int], item_bytes: int, shared: int) -> Iterator[str]:
    if sizes["heads"] % sizes["kv_heads"]:
        yield "query heads don't share key/value heads evenly"
    if not 1 <= launch.num_parts <= MAX_PARTS:
        yield f"num_parts is {launch.num_parts}, not 1 to {MAX_PARTS}"
    if not is_power(launch.tile) or not 16 <= launch.tile <= 256:
        yield f"tile is {launch.tile}, not a power of two from 16 to 256"
    head_dim = 1 << (sizes["head_dim"] - 1).bit_length()
    taken = launch.num_stages * 2 * launch.tile * head_dim * item_bytes  # keys and values
    if taken > shared:
        yield f"{taken} bytes of shared memory, the device has {shared}"


def expert_problems(launch: ExpertLaunch, sizes: dict[str, int], item_bytes: int, shared: int) -> Iterator[str]:
    if launch.block_m not in (1, 16, 32, 64, 128):
        yield f"block_m is {launch.block_m}, not 1, 16, 32, 64 or 128"
    tiles = ((2, launch.block_n, launch.block_k), (1, launch.down_block_n, launch.down_block_k))
    if not all(is_power(number) for _, *tile in tiles for number in tile):
        yield f"a tile of {tiles[0][1:]} or {tiles[1][1:]} isn't of powers of two"
    elif launch.block_m == 1:
        if (held := max(width * n * k for width, n, k in tiles) // (32 * launch.num_warps)) > MAX_THREAD_ELEMENTS:
            yield f"{held} elements for each thread, at most {MAX_THREAD_ELEMENTS} fit its registers"
    elif min(number for _, *tile in tiles for number in tile) < 16:
        yield "matrix instructions take 16 rows and columns at least"
    elif (taken := launch.num_stages * max((launch.block_m + n) * k for _, n, k in tiles) * item_bytes) > shared:
        yield f"{taken} bytes of shared memory, the device has {shared}"


def packed_problems(launch: ExpertLaunch, shared: int) -> Iterator[str]:
    """Rows of the weight are the left operand: 4 bits an element in shared memory, in registers a quarter at a time."""
    if launch.block_m not in (1, 8, 16, 32, 64, 128):
        yield f"block_m is {launch.block_m}, not 1, 8, 16, 32, 64 or 128"
    warps, stages = launch.down_num_warps or launch.num_warps, launch.down_num_stages or launch.num_stages
    if (
        warps not in ((1, 2, 4, 8) if launch.block_m <= MAX_STREAMED else (4, 8))
        or not 1 <= stages <= 8
        or not 1 <= launch.down_split_k <= 4
    ):
        yield f"down projections with {warps} warps, {stages} stages, {launch.down_split_k} parts"
    if launch.block_m <= MAX_STREAMED:
        yield from streamed_problems(launch, warps, stages)
        return
    vectors = launch.block_m
    for rows, columns, num_warps, num_stages in (
        (2 * launch.block_n, launch.block_k, launch.num_warps, launch.num_stages),
        (launch.down_block_n, launch.down_block_k, warps, stages),
    ):
        if not (is_power(rows) and is_power(columns) and 64 <= rows <= 512 and 128 <= columns <= 512):
            yield f"a tile of {rows} by {columns} isn't of powers of two up to 512, from 64 and 128"
        taken = num_stages * columns * (rows // 2 + 2 * vectors)
        if taken > shared:
            yield f"{taken} bytes of shared memory, the device has {shared}"
        if (held := rows * vectors // (32 * num_warps)) > MAX_THREAD_ELEMENTS:
            yield f"{held} sums for each thread, at most {MAX_THREAD_ELEMENTS} fit its registers"


def streamed_problems(launch: ExpertLaunch, down_warps: int, down_stages: int) -> Iterator[str]:
    """Words and vectors of the blocks ahead are in registers."""
    for rows, num_warps, num_stages in (
        (2 * launch.block_n, launch.num_warps, launch.num_stages),
        (launch.down_block_n, down_warps, down_stages),
    ):
        if not (is_power(rows) and 1 <= rows // (ROWS_OF_WARP * num_warps) <= 4):
            yield f"{rows} rows for {num_warps} warps: each takes 16, 32 or 64"
        if not 1 <= num_stages <= 6:
            yield f"{num_stages} blocks ahead, not 1 to 6"


def linear_problems(
    launch: LinearLaunch, sizes: dict[str, int], item_bytes: int, shared: int, *, operation: str, rows: int
) -> Iterator[str]:
    width = 1 + (operation == "linear_gated")
    if rows > MAX_ROWS:
        yield f"max_rows is {rows}: more than {MAX_ROWS} rows never come here"
    if launch.block_m == 0:
        if launch != CUBLAS:
            yield "block_m 0 leaves it to cuBLAS, which takes no parameters"
        return
    if launch.block_m not in (1, 16, 32, 64, 128):
        yield f"block_m is {launch.block_m}, not 0, 1, 16, 32, 64 or 128"
    for name in ("block_n", "block_k"):
        if not is_power(getattr(launch, name)):
            yield f"{name} is {getattr(launch, name)}, not a power of two"
    if launch.prefetch and not is_power(launch.prefetch):
        yield f"prefetch is {launch.prefetch}, neither 0 nor a power of two"
    if launch.block_n * width > sizes["n"] or launch.block_k > sizes["k"]:
        yield f"a tile of {launch.block_n} by {launch.block_k} is larger than the weight"
    if launch.block_m == 1:
        yield from row_problems(launch, width, rows)
    else:
        yield from tile_problems(launch, sizes, item_bytes, shared, width=width, rows=rows)


def row_problems(launch: LinearLaunch, width: int, rows: int) -> Iterator[str]:
    if rows != 1:
        yield f"max_rows is {rows}: block_m 1 is for one row"
    if launch.split_k != 1 or launch.tma or not launch.joined:
        yield "the kernel for one row takes neither split_k nor tma, and is joined"
    if (held := width * launch.block_n * launch.block_k // (32 * launch.num_warps)) > MAX_THREAD_ELEMENTS:
        yield f"{held} elements for each thread, at most {MAX_THREAD_ELEMENTS} fit its registers"


def tile_problems(
    launch: LinearLaunch, sizes: dict[str, int], item_bytes: int, shared: int, *, width: int, rows: int
) -> Iterator[str]:
    if launch.block_n < 16 or launch.block_k < 16:
        yield f"a tile of {launch.block_n} by {launch.block_k}; matrix instructions take 16 at least"
    taken = launch.num_stages * (launch.block_n * width + launch.block_m) * launch.block_k * item_bytes
    if taken > shared:
        yield f"{taken} bytes of shared memory, the device has {shared}"
    if not 1 <= launch.split_k <= 8:
        yield f"split_k is {launch.split_k}, not 1 to 8"
    if launch.split_k > 1 and rows > launch.block_m:
        yield f"split_k {launch.split_k} for {rows} rows in tiles of {launch.block_m}"
    if not launch.joined and (launch.split_k == 1 or width == 2):
        yield "joined is false, but nothing could be left to a reader"
    tiles = -(-rows // launch.block_m) * -(-sizes["n"] // (launch.block_n * width))
    room = tiles * launch.split_k * launch.block_m * launch.block_n * width
    if launch.split_k > 1 and launch.joined and (tiles > WORKSPACE_TILES or room > WORKSPACE_ELEMENTS):
        yield f"{tiles} tiles with {room} elements of parts: more than the workspace has"


def entry_problems(device: str, operation: str, shape: str, entry: tuning.TunedEntry) -> list[str]:
    """All that is wrong with one entry, in words."""
    if operation not in SIZES:
        return [f"no operation is called {operation}"]
    dtype, *pairs = shape.split(" ")
    pattern = " ".join([rf"({'|'.join(ITEM_BYTES)})", *(rf"{name}=[1-9]\d*" for name in SIZES[operation])])
    if not re.fullmatch(pattern, shape):
        return [f"the shape isn't a dtype with {', '.join(SIZES[operation])}"]
    if device not in SHARED_BYTES:
        return [f"nothing is known of {device}: add it to SHARED_BYTES"]
    sizes = {name: int(value) for name, value in (pair.split("=") for pair in pairs)}
    default = DEFAULTS[operation]
    for name, value in entry.params.items():
        if type(value) is not type(asdict(default).get(name)):
            return [f"{name} is {value!r}, which {type(default).__name__} doesn't take"]
    if not entry.params:
        return []  # the default
    launch = type(default)(**{**asdict(default), **entry.params})
    found = []
    if launch.num_warps not in (1, 2, 4, 8):
        found.append(f"num_warps is {launch.num_warps}, not 1, 2, 4 or 8")
    if not 1 <= launch.num_stages <= 8:
        found.append(f"num_stages is {launch.num_stages}, not 1 to 8")
    common = (launch, sizes, ITEM_BYTES[dtype], SHARED_BYTES[device])
    if operation == "attention_decode":
        return [*found, *attention_problems(*common)]
    if operation == "experts" and dtype == PACKED:
        return [*found, *packed_problems(launch, SHARED_BYTES[device])]
    if operation == "experts":
        return [*found, *expert_problems(*common)]
    if launch.tma and device not in HAS_TMA:
        found.append(f"tma, which {device} lacks")
    return [*found, *linear_problems(*common, operation=operation, rows=entry.max_rows)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_shipped_files(path: Path) -> None:
    file = tuning.load(path)
    assert file is not None
    found = [
        f"{operation}, {shape}, up to {entry.max_rows} rows: {problem}"
        for operation, shapes in file.operations.items()
        for shape, entries in shapes.items()
        for entry in entries
        for problem in entry_problems(file.device, operation, shape, entry)
    ]
    assert not found, "\n".join(found)


ATTENTION = ("attention_decode", "bfloat16 heads=32 kv_heads=8 head_dim=128 block_size=64")
LINEAR = ("linear_add", "bfloat16 n=4096 k=14336")
EXPERTS = ("experts", "bfloat16 experts=128 top_k=8 hidden=2048 inner=768")
MXFP4 = ("experts", "uint8 experts=32 top_k=4 hidden=2880 inner=2880")
GATED = ("linear_gated", "bfloat16 n=28672 k=4096")
ONE_ROW = {"block_m": 1, "block_n": 4, "block_k": 1024, "num_warps": 4}


@pytest.mark.parametrize(
    ("case", "rows", "params", "says"),
    [
        (("linear_sub", "bfloat16 n=1 k=1"), 1, {}, "no operation is called linear_sub"),
        (("linear_add", "bfloat16 k=4096 n=4096"), 1, {}, "isn't a dtype with n, k"),
        (("linear_add", "int4 n=4096 k=4096"), 1, {}, "isn't a dtype with n, k"),
        (ATTENTION, 1, {"tiles": 64}, "tiles is 64, which DecodeLaunch doesn't take"),
        (ATTENTION, 1, {"tile": True}, "tile is True"),
        (ATTENTION, 1, {"tile": 48}, "tile is 48, not a power of two"),
        (ATTENTION, 1, {"num_parts": 65}, "num_parts is 65"),
        (ATTENTION, 1, {"num_warps": 3}, "num_warps is 3"),
        (ATTENTION, 1, {"tile": 128, "num_stages": 4}, "262144 bytes of shared memory, the device has 232448"),
        (("attention_decode", "float32 heads=32 kv_heads=8 head_dim=128 block_size=64"), 1,
         {"tile": 64, "num_stages": 4}, "262144 bytes of shared memory"),
        (("attention_decode", "bfloat16 heads=9 kv_heads=2 head_dim=128 block_size=64"), 1, {"tile": 64}, "evenly"),
        (EXPERTS, 16, {"block_m": 8}, "block_m is 8"),
        (EXPERTS, 16, {"block_n": 48}, "isn't of powers of two"),
        (EXPERTS, 16, {"block_m": 1, "block_n": 64, "block_k": 1024}, "1024 elements for each thread"),
        (EXPERTS, 16, {"block_n": 8}, "take 16 rows"),
        (EXPERTS, 16, {"block_k": 1024, "num_stages": 4}, "393216 bytes of shared memory"),
        (MXFP4, 16, {"block_n": 16}, "a tile of 32 by 128 isn't of powers of two"),
        (MXFP4, 16, {"down_block_k": 64}, "a tile of 64 by 64 isn't of powers of two"),
        (MXFP4, 16, {"down_num_stages": 9}, "down projections with 4 warps, 9 stages, 1 parts"),
        (MXFP4, 8, {"block_m": 8, "block_n": 16}, "32 rows for 4 warps: each takes 16, 32 or 64"),
        (MXFP4, 1, {"block_m": 1, "num_stages": 7, "down_num_stages": 3}, "7 blocks ahead, not 1 to 6"),
        (MXFP4, 16, {"block_m": 128, "block_n": 128, "num_stages": 2}, "256 sums for each thread"),
        (MXFP4, 16, {"block_m": 128, "block_k": 512, "num_stages": 2}, "294912 bytes of shared memory"),
        (LINEAR, 16, {"block_k": 512, "num_stages": 5}, "245760 bytes of shared memory"),
        (GATED, 16, {"block_k": 512, "num_stages": 3}, "245760 bytes of shared memory"),
        (LINEAR, 16, {"block_m": 8}, "block_m is 8"),
        (LINEAR, 16, {"block_n": 48}, "block_n is 48"),
        (LINEAR, 16, {"num_stages": 9}, "num_stages is 9"),
        (LINEAR, 16, {"prefetch": 100}, "prefetch is 100"),
        (LINEAR, 64, {"split_k": 2}, "split_k 2 for 64 rows in tiles of 16"),
        (LINEAR, 16, {"joined": False}, "nothing could be left"),
        (LINEAR, 1024, {"block_m": 64}, "max_rows is 1024"),
        (LINEAR, 4, ONE_ROW, "block_m 1 is for one row"),
        (LINEAR, 1, {**ONE_ROW, "block_n": 32}, "256 elements for each thread"),
        (LINEAR, 1, {**ONE_ROW, "split_k": 2}, "takes neither split_k"),
        (LINEAR, 1, {"block_m": 0, "block_n": 64}, "cuBLAS, which takes no parameters"),
        (("linear_add", "bfloat16 n=16 k=64"), 4, {"block_n": 32}, "larger than the weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_found(case: tuple[str, str], rows: int, params: dict[str, Any], says: str) -> None:
    found = entry_problems("NVIDIA H200", *case, tuning.TunedEntry(rows, params))
    assert len(found) == 1 and says in found[0], found


@pytest.mark.parametrize("num_processors", [0, 78, 132])
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [*itertools.product((1, 2, 16, 17, 64, 65), (torch.bfloat16, torch.float32)), (1, torch.float8_e4m3fn)],
)
def test_products_without_a_tuned_entry_fit_any_described_device(
    rows: int, dtype: torch.dtype, num_processors: int
) -> None:
    shared = min(SHARED_BYTES.values())
    for variant, n, k in itertools.product(
        ("plain", "add", "norm", "gated"), (1000, 4608, 152064), (1000, 1001, 28672)
    ):
        launch = default_params(variant, dtype, n, k, rows, num_processors=num_processors)  # type: ignore[arg-type]
        sizes = {"n": n, "k": 8192 if rows == 1 else k}  # a block may be longer than the only row of the input
        problems = linear_problems(launch, sizes, dtype.itemsize, shared, operation=f"linear_{variant}", rows=rows)
        assert not list(problems), (variant, n, k, launch)
        assert rows > 16 or launch != CUBLAS


def test_another_device_must_be_described_first() -> None:
    (found,) = entry_problems("NVIDIA B200", *LINEAR, tuning.TunedEntry(1, ONE_ROW))
    assert "nothing is known of NVIDIA B200" in found
