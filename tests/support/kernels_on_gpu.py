"""Kernel tests on a machine with a GPU: kernels that are given tensors of the CPU run on the GPU, over copies.

With `TRITON_INTERPRET=0`, `install` replaces the start of kernels. The tests of kernels then check the compiled code
with the same tensors and references as under Triton's interpreter. Tests of whole workers use `KERNEL_DEVICE` instead.
Called by tests/conftest.py.
"""

import os
from typing import Any

import torch
from torch import Tensor

COMPILED = os.environ.get("TRITON_INTERPRET") == "0"
"""Whether kernels are compiled for a GPU. Otherwise they run under Triton's interpreter."""
KERNEL_DEVICE = torch.device("cuda:0" if COMPILED else "cpu")
"""The device of workers whose kernels are tested."""


class Copies:
    """Copies on the GPU of all storages that a kernel's arguments use. Tensors that share memory still share it."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, Any]] = {}

    def of(self, value: Any) -> Any:
        """Returns the view of the copy that is what the argument is of its own storage; other values as they are."""
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage, storage.cuda()
        copy = torch.empty(0, dtype=value.dtype, device="cuda")
        return copy.set_(self._storages[storage.data_ptr()][1], value.storage_offset(), value.shape, value.stride())

    def bring_back(self) -> None:
        """Writes what the kernel has written into the tensors of the CPU, if there are any."""
        for storage, copy in self._storages.values():
            storage.copy_(copy)


def install() -> None:
    """Replaces the start of kernels by one over copies, for arguments on the CPU."""
    from antiphon.services.engine.backends.triton.kernels import runtime

    start = runtime._start

    def start_on_copies(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        warps: int,
        stages: int,
    ) -> None:
        copies = Copies()
        given = tuple(map(copies.of, arguments))
        start(kernel, grid, given, constants, warps, stages)
        # A kernel whose arguments are on the GPU may be captured in a graph, where nothing may wait.
        copies.bring_back()

    runtime._start = start_on_copies
