"""Operations as Triton kernels."""
