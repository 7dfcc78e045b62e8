"""Checksums of the weights in host memory, which detect any changed bit.

Rounding may hide a small change of the weights from the canary; a checksum detects it. Each portion is summed as
unsigned 64-bit integers, so one changed bit, or any number of changed bits in one word, always changes the sum.
"""

import ctypes
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from antiphon.services.engine.worker.interface import WeightMemory

PORTION_BYTES = 4 * 2**20
_WORD = 8


@dataclass(slots=True)
class _Portion:
    memory: WeightMemory
    offset: int
    num_bytes: int
    sum: int

    @property
    def place(self) -> str:
        return f"{self.memory.name}, bytes {self.offset} to {self.offset + self.num_bytes}"


class Checksums:
    """The checksums of the weights at the creation of this object, and their comparison with the present ones."""

    def __init__(self, weights: Iterable[WeightMemory]) -> None:
        self._portions = [
            _Portion(memory, offset, min(PORTION_BYTES, memory.num_bytes - offset), 0)
            for memory in weights
            for offset in range(0, memory.num_bytes, PORTION_BYTES)
        ]
        for portion in self._portions:
            portion.sum = _sum(portion)
        self._next = 0
        self.num_passes = 0
        """How often all weights have been checked."""

    @property
    def num_bytes(self) -> int:
        """Size of the weights that are checked."""
        return sum(portion.num_bytes for portion in self._portions)

    @property
    def num_portions(self) -> int:
        """Number of calls of `check_next` for all weights."""
        return len(self._portions)

    def check_next(self) -> str:
        """Checks the next portion. Returns the place of changed weights; empty if none have changed."""
        if not self._portions:
            return ""
        portion = self._portions[self._next]
        self._next = (self._next + 1) % len(self._portions)
        self.num_passes += not self._next
        return "" if _sum(portion) == portion.sum else portion.place


def _sum(portion: _Portion) -> int:
    address = portion.memory.address + portion.offset
    data = (ctypes.c_uint8 * portion.num_bytes).from_address(address)
    values = np.frombuffer(memoryview(data), dtype=np.uint8)
    num_whole = portion.num_bytes // _WORD * _WORD
    words = values[:num_whole].view(np.uint64)
    return (int(words.sum(dtype=np.uint64)) << 32) | zlib.crc32(values[num_whole:].tobytes())
