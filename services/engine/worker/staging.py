"""What a step sends to the device: many small arrays, written into one host buffer and copied in one piece.

The host buffers are pinned and take turns, so that the next step is written while the last one is still being copied.
An array's place depends only on the capacities of those before it: a captured graph finds it again in every step.
Called by the GPU worker.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED_BYTES = 16
_TURNS = 3
_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staging:
    """Room for `num_bytes` a step, for ever: places never move."""

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
        """Starts a step's arrays."""
        self._turn = (self._turn + 1) % _TURNS
        self._used = 0
        if self._device.type == "cuda":
            self._copied[self._turn].synchronize()

    def put(self, values: NDArray[Any], capacity: int = 0, dtype: Any = np.int32) -> Tensor:
        """The array's place on the device, [at least capacity]; what it holds is there after `upload`."""
        numpy_type = np.dtype(dtype)
        count, start = len(values), self._used
        room = max(count, capacity)
        end = start + -(-room * numpy_type.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
        assert end <= len(self._target), f"a step needs {end} bytes of {len(self._target)}"
        self._arrays[self._turn][start : start + count * numpy_type.itemsize].view(numpy_type)[:] = values
        self._used = end
        key = (start, room, numpy_type)
        if key not in self._places:
            piece = self._target[start : start + room * numpy_type.itemsize]
            self._places[key] = piece.view(_TYPES[numpy_type])
        return self._places[key]

    def upload(self) -> None:
        """Copies what was put, behind what the device still does."""
        host = self._hosts[self._turn][: self._used]
        self._target[: self._used].copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn].record()

    def put_any(self, values: NDArray[Any], dtype: Any = np.int32) -> Tensor:
        """The same for an array of any size: what does not fit well is copied by itself, at once."""
        if values.nbytes <= len(self._target) // 4 and self._used + 2 * values.nbytes + 64 < len(self._target):
            return self.put(values, dtype=dtype)
        return sent(torch.from_numpy(values.astype(dtype)), self._device)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that is begun and not waited for.

    It goes by pinned memory, which PyTorch keeps until it has arrived; a copy from other memory waits for everything
    that the device still has to do.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
