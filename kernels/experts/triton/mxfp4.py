"""Numbers in MXFP4 (:mod:`splitserve.kernels.experts.mxfp4`, ordered ``by_halves``), inside Triton kernels."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

_TWO_TO_126 = tl.constexpr(2.0**126)


@triton.jit
def elements_of(blocks):
    """Return the elements in the low and the high half of each byte, in float32, without their scale."""
    wide = blocks.to(tl.uint32)
    return _element(wide), _element(wide >> 4)


@triton.jit
def _element(number):
    """Return the value of E2M1, whose lowest three bits are a float32's last exponent bits and first bit of the
    fraction, 2**126 times too small; 0.5 is a subnormal number there, as it is in E2M1."""
    bits = ((number & 7) << 22) | ((number & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _TWO_TO_126


@triton.jit
def power_of_two(scales):
    """Return ``2 ** (scales - 127)`` in float32; the exponent's byte is that of a float32 but for 0, which is 2**-127,
    below the normal numbers, and which counts as 0 here."""
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
