"""Blocks that consist of pieces in several arrays, their copies to and from contiguous memory, and the checksum.

The C++ library (`NativeCopy`) copies and sums in one pass over the memory; without it, numpy does both one after the
other. Both give the same bytes and the same checksum.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
NativeCopy = Callable[[int, int, int, int, bool, int], None]
"""`native.Library.copy_block`: address of the pieces' addresses, their number, bytes of a piece, address of the
contiguous memory, whether the pieces are written, address of the sums."""
_ROW_WORDS = 512
_ROW_BYTES = 8 * _ROW_WORDS


def checksum(data: Bytes) -> int:
    """Returns a checksum of a contiguous block: the CRC-32 of its row sums and column sums as a table of 64-bit words.

    It detects damage within one row or one column, and a wrong order of rows. It takes a fifth of the time of a CRC-32
    over all bytes, which would take longer than the transfer through shared memory.
    """
    flat = data.reshape(-1)
    num_rows = flat.size // _ROW_BYTES
    table = flat[: num_rows * _ROW_BYTES].view("<u8").reshape(num_rows, _ROW_WORDS)
    return _of_sums(np.concatenate([table.sum(axis=axis, dtype="<u8") for axis in (0, 1)]), flat)


class PiecedBlocks:
    """Blocks of which each has one piece in each of several arrays, [blocks, bytes of a piece].

    The bytes of a piece must be contiguous in memory; all arrays have the same shape.
    """

    def __init__(self, arrays: Sequence[Bytes], native: NativeCopy | None = None) -> None:
        self.num_bytes = sum(array.shape[1] for array in arrays)
        """Size of a whole block."""
        assert all(array.shape == arrays[0].shape and array.strides[1] == 1 for array in arrays)
        self._arrays, self._native = arrays, native
        self._num_blocks = len(arrays[0])
        self._first = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        self._stride = np.array([array.strides[0] for array in arrays], dtype=np.int64)

    def read(self, block: int, out: Bytes) -> int:
        """Copies the beginnings of a block's pieces to `out`, one after the other. Returns the checksum of `out`.

        `out` is contiguous and as long as all beginnings together; these are of equal length.
        """
        flat = out.reshape(-1)
        if self._native is not None:
            return self._copy(self._native, block, flat, to_pieces=False)
        for part, array in zip(flat.reshape(len(self._arrays), -1), self._arrays, strict=True):
            part[:] = array[block, : part.size]
        return checksum(flat)

    def write(self, block: int, data: Bytes) -> int:
        """Copies contiguous `data` to the beginnings of a block's pieces. Returns the checksum of `data`."""
        flat = data.reshape(-1)
        if self._native is not None:
            return self._copy(self._native, block, flat, to_pieces=True)
        for part, array in zip(flat.reshape(len(self._arrays), -1), self._arrays, strict=True):
            array[block, : part.size] = part
        return checksum(flat)

    def _copy(self, native: NativeCopy, block: int, whole: Bytes, *, to_pieces: bool) -> int:
        count = len(self._arrays)
        if not 0 <= block < self._num_blocks or whole.size % count or whole.size > self.num_bytes:
            raise IndexError(f"block {block} of {self._num_blocks}, {whole.size} of {self.num_bytes} bytes")
        pieces = self._first + block * self._stride
        sums = np.empty(_ROW_WORDS + whole.size // _ROW_BYTES, dtype=np.uint64)
        native(pieces.ctypes.data, count, whole.size // count, whole.ctypes.data, to_pieces, sums.ctypes.data)
        return _of_sums(sums, whole)


def _of_sums(sums: NDArray[np.uint64], flat: Bytes) -> int:
    """Returns the checksum for column sums and then row sums, and the bytes after the last row."""
    rest = zlib.crc32(flat[flat.size // _ROW_BYTES * _ROW_BYTES :].data)
    return zlib.crc32(sums.data, rest)
