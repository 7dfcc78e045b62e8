"""How kernels are started, on a device, under the interpreter, or only noted for the compile gate.

Nothing here computes. Launchers call `launch`; the gate puts itself in its place to learn what would be compiled.
Under `TRITON_INTERPRET=1`, set before the first import, kernels run on CPU tensors: slowly, to test their numerics. Its
bfloat16 arithmetic is wrong, so kernels widen what they multiply where `UPCAST` says so.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
UPCAST = tl.constexpr(INTERPRETED)
"""Read by kernels: operands of a product are widened to float32."""
LOG2E = tl.constexpr(1.4426950408889634)

Launch = Callable[..., None]
_INTERPRETED_PROGRAMS = 3
_ASSUMED_PROCESSORS = 132
"""Where there is no device to ask: what an H200 has."""


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, warps: int, stages: int = 2, **constants: Any
) -> None:
    """Starts a kernel over a grid, which may be empty. `constants` are its compile-time arguments."""
    if min(grid) > 0:
        # AMD's warps have twice the threads.
        warps = max(1, warps // 2) if architecture().startswith("gfx") else warps
        _start(kernel, grid, arguments, constants, warps, stages)


def record_launches(start: Launch, for_architecture: str) -> None:
    """From now on `start(kernel, grid, arguments, constants, warps, stages)` is called instead of the device."""
    global _start
    _start = start
    architecture.cache_clear()
    _assumed.append(for_architecture)


@functools.cache
def architecture() -> Literal["sm_80", "sm_90", "gfx942"]:
    """The kind of device that sizes are chosen for: the newest known one that this one is not older than."""
    if _assumed:
        return _assumed[-1]
    if torch.version.hip is not None:
        return "gfx942"
    old = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9
    return "sm_80" if old else "sm_90"


def num_processors(device: torch.device) -> int:
    """Multiprocessors: what the grid of a kernel that takes its work from a list is a multiple of."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _INTERPRETED_PROGRAMS if INTERPRETED else _ASSUMED_PROCESSORS


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is not below `n` and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def ceil_div(n: int, by: int) -> int:
    """N / by rounded up."""
    return -(-n // by)


def _on_device(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int
) -> None:
    # A device gives infinities without a word; where NumPy computes, it would warn of them.
    with np.errstate(all="ignore") if INTERPRETED else contextlib.nullcontext():
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


_start: Launch = _on_device
_assumed: list[Any] = []
"""What the compile gate asks for."""


def _mend_interpreter() -> None:
    """Loop bounds are arrays of one element in Triton 3.6's interpreter; NumPy from 2.4 on does not make them ints."""
    from triton.runtime import interpreter

    patch: Callable[[Any, Any], None] = getattr(interpreter, "_patch_lang_tensor")  # noqa: B009 (it is private)

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    setattr(interpreter, "_patch_lang_tensor", patch_and_mend)  # noqa: B010 (it is private)


if INTERPRETED:
    _mend_interpreter()
