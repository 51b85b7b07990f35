"""A CUDA driver's copies, carried out on host memory."""

import ctypes

POINTER, SIZE, SIZES = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)


ADDRESSES = ctypes.POINTER(ctypes.c_uint64)


NOT_SUPPORTED = 801


STREAM = 77


class HostDriver:
    """The copies of libcuda, done within host memory at once; batches where ``batches``, which fail where ``fails``."""

    def __init__(self, *, batches: bool, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.cuMemcpyAsync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, SIZE, POINTER)(self.one)
        self.cuMemcpy2DAsync_v2 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(SIZE * 16), POINTER)(self.rows)
        if batches:
            batch = ctypes.CFUNCTYPE(ctypes.c_int, ADDRESSES, ADDRESSES, SIZES, SIZE, POINTER, SIZES, SIZE, POINTER)
            self.cuMemcpyBatchAsync_v2 = batch(self.batch)
            batch = ctypes.CFUNCTYPE(ctypes.c_int, SIZE, ctypes.POINTER(SIZE * 14), ctypes.c_ulonglong, POINTER)
            self.cuMemcpy3DBatchAsync_v2 = batch(self.batch_of_rows)

    def one(self, target: int, source: int, size: int, stream: int) -> int:
        self.calls.append("one")
        ctypes.memmove(target, source, size)
        return int(stream != STREAM)

    def rows(self, copy: "ctypes._Pointer[ctypes.Array[ctypes.c_size_t]]", stream: int) -> int:
        self.calls.append("rows")
        _, _, _, _, source, _, source_pitch, _, _, _, _, target, _, target_pitch, width, height = copy.contents
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return int(stream != STREAM)

    def batch(self, targets, sources, sizes, count, attributes, first, num_attributes, stream) -> int:
        self.calls.append("batch")
        assert ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[0] == 1
        assert (first[0], num_attributes, stream) == (0, 1, STREAM)
        for index in range(0 if self.fails else count):
            ctypes.memmove(targets[index], sources[index], sizes[index])
        return NOT_SUPPORTED if self.fails else 0

    def batch_of_rows(self, count, operations, flags, stream) -> int:
        self.calls.append("batch of rows")
        assert (flags, stream) == (0, STREAM)
        for index in range(0 if self.fails else count):
            words = list(operations[index])
            assert [words[at] for at in (0, 3, 4, 5, 8, 9, 12, 13)] == [1, 0, 0, 1, 0, 0, 1, 1]
            _, source, source_pitch, _, _, _, target, target_pitch, _, _, width, height, _, _ = words
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return NOT_SUPPORTED if self.fails else 0
