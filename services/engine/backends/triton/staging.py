"""Sends a step's many small arrays to the device: they are written into one host buffer and copied in one piece.

The host buffers are pinned and used in turn, so that the next step can be written while the previous one is still being
copied. The device address of an array depends only on the capacities of the arrays before it, so a captured CUDA graph
finds the array at the same address in every step. Called by the GPU worker.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED_BYTES = 16
_TURNS = 3
_PLACES = 1024
"""Views of the device buffer that are kept: those of all graphs, and of steps that come again. Each takes 0.4 KB."""
_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staging:
    """Host and device buffers of `num_bytes` for one step's arrays. They are allocated once and never move."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._turn, self._used = 0, 0
        pinned = device.type == "cuda"
        size = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(_TURNS)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in range(_TURNS)] if pinned else []
        self._places: dict[tuple[int, int, np.dtype[Any]], Tensor] = {}

    def begin(self) -> None:
        """Starts the arrays of a new step. Waits if the host buffer of this turn is still being copied."""
        self._turn = (self._turn + 1) % _TURNS
        self._used = 0
        if self._device.type == "cuda":
            self._copied[self._turn].synchronize()

    def put(self, values: NDArray[Any], capacity: int = 0, dtype: Any = np.int32) -> Tensor:
        """Returns the tensor on the device, [max(len(values), capacity)], whose content is valid after `upload`."""
        numpy_type = np.dtype(dtype)
        count, start = len(values), self._used
        room = max(count, capacity)
        end = start + -(-room * numpy_type.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
        assert end <= len(self._target), f"a step needs {end} bytes of {len(self._target)}"
        self._arrays[self._turn][start : start + count * numpy_type.itemsize].view(numpy_type)[:] = values
        self._used = end
        key = (start, room, numpy_type)
        if key not in self._places:
            if len(self._places) == _PLACES:
                # Steps with prompts of all lengths have places of all sizes. Views made again have the same address.
                self._places.clear()
            piece = self._target[start : start + room * numpy_type.itemsize]
            self._places[key] = piece.view(_TYPES[numpy_type])
        return self._places[key]

    def upload(self) -> None:
        """Starts the copy of all arrays of the step, in stream order."""
        host = self._hosts[self._turn][: self._used]
        self._target[: self._used].copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn].record()

    def put_any(self, values: NDArray[Any]) -> Tensor:
        """Like `put`, for an array of any size. An array too large for the rest of the buffer is copied by itself."""
        if values.nbytes <= len(self._target) // 4 and self._used + 2 * values.nbytes + 64 < len(self._target):
            return self.put(values, dtype=np.int32)
        return sent(torch.from_numpy(values.astype(np.int32)), self._device)


def aligned(num_words: int) -> int:
    """Returns how many 32-bit words an array of so many takes if another one follows it at an aligned address.

    A kernel has one variant for aligned arrays, and further ones for others.
    """
    return -(-4 * num_words // _ALIGNED_BYTES) * _ALIGNED_BYTES // 4


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Starts an asynchronous copy to the device and returns the device tensor.

    On CUDA the copy goes through pinned memory, which PyTorch keeps until the copy is complete. A copy from pageable
    memory would wait for all work queued on the device.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
