"""Numbers in MXFP4 (:mod:`splitserve.kernels.experts.mxfp4`), inside Triton kernels."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def elements_of(blocks):
    """Return the first and the second element of each byte, in float32, without their scale."""
    return _element(blocks & 15), _element(blocks >> 4)


@triton.jit
def _element(number):
    """Return the value of E2M1: the bits of a float32 are put together, and 0 and 0.5 are told apart by hand."""
    wide = number.to(tl.int32)
    exponent, mantissa = (wide >> 1) & 3, wide & 1
    bits = ((exponent + 126) << 23) | (mantissa << 22)
    magnitude = tl.where(exponent == 0, mantissa * 0.5, bits.to(tl.float32, bitcast=True))
    return tl.where(wide > 7, -magnitude, magnitude)


@triton.jit
def power_of_two(scales):
    """Return ``2 ** (scales - 127)`` in float32; the exponent's byte is that of a float32 but for 0, which is 2**-127,
    below the normal numbers, and which counts as 0 here."""
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
