"""Launches kernels on a device or under the interpreter, or only records launches for the compile gate.

The compile gate is a check that compiles all kernels without a GPU. Launchers call `launch`. The gate calls
`record_launches`, after which `launch` runs no kernel and only records which ones must be compiled. Under
`TRITON_INTERPRET=1`, set before the first import, kernels run on CPU tensors: slowly, to test their numerics. The
interpreter's bfloat16 arithmetic is wrong, so kernels convert the operands of products to float32 if `UPCAST` is true.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
UPCAST = tl.constexpr(INTERPRETED)
"""Whether kernels convert the operands of products to float32."""
LOG2E = tl.constexpr(1.4426950408889634)

Launch = Callable[..., Any]
_INTERPRETED_PROGRAMS = 3
_ASSUMED_PROCESSORS = 132
"""Number of multiprocessors assumed if there is no device: that of an H200."""
_PROGRAMS_MAX = 32
"""Most programs that a multiprocessor takes, whatever they need."""
_USUAL_PROGRAMS = 4
"""Programs that a multiprocessor is assumed to run at once until the compiled kernel tells."""


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, warps: int, stages: int = 2, **constants: Any
) -> Any:
    """Starts a kernel over a grid; does nothing if the grid is empty. `constants` are the compile-time arguments.

    Returns the compiled kernel; None if none was compiled.
    """
    if min(grid) == 0:
        return None
    # AMD's warps have twice as many threads.
    warps = max(1, warps // 2) if architecture().startswith("gfx") else warps
    return _start(kernel, grid, arguments, constants, warps, stages)


def launch_filling(
    num_tasks: int, kernel: Any, device: torch.device, *arguments: Any, warps: int, stages: int = 2, **constants: Any
) -> None:
    """Starts a kernel whose programs share `num_tasks` tasks: as many as the device runs at once, one for each task.

    With more programs the last would begin when the first have ended, and run with idle multiprocessors around them.
    How many a multiprocessor runs at once is known after a variant's first launch (`Multiprocessor`).
    """
    types = tuple(argument.dtype for argument in arguments if isinstance(argument, Tensor))
    variant = (kernel, warps, stages, *constants.values(), *types)
    programs = min(num_tasks, num_processors(device) * _programs.get(variant, _USUAL_PROGRAMS))
    compiled = launch(kernel, (programs,), *arguments, warps=warps, stages=stages, **constants)
    if variant not in _programs and device.type == "cuda" and torch.version.hip is None:
        limits = multiprocessor(device)
        _programs[variant] = limits.programs(compiled.n_regs, compiled.metadata.shared, 32 * warps)


_programs: dict[tuple[Any, ...], int] = {}
"""For each variant of a kernel that has run, the programs that a multiprocessor runs at once."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What the programs on a multiprocessor share. `shared` in bytes."""

    registers: int
    shared: int
    threads: int

    def programs(self, registers: int, shared: int, threads: int) -> int:
        """Returns how many programs run at once, at least 1.

        `registers`: of each thread; `shared`: bytes of shared memory; `threads`: of a program. Registers are given to
        warps in pieces of 256, and each program takes 1 KiB of shared memory for the system (CUDA's table of compute
        capabilities 8.0 to 10.0).
        """
        of_a_program = -(-registers * 32 // 256) * 256 * (threads // 32)
        fitting = self.registers // of_a_program, self.shared // (shared + 1024), self.threads // threads, _PROGRAMS_MAX
        return max(1, min(fitting))


@functools.cache
def multiprocessor(device: torch.device) -> Multiprocessor:
    """Returns what the multiprocessors of a CUDA device have."""
    found = torch.cuda.get_device_properties(device)
    return Multiprocessor(
        found.regs_per_multiprocessor, found.shared_memory_per_multiprocessor, found.max_threads_per_multi_processor
    )


def record_launches(start: Launch, for_architecture: str) -> None:
    """Replaces kernel starts by calls of `start(kernel, grid, arguments, constants, warps, stages)` from now on.

    `architecture` then returns `for_architecture`.
    """
    global _start
    _start = start
    architecture.cache_clear()
    _assumed.append(for_architecture)


@functools.cache
def architecture() -> Literal["sm_80", "sm_90", "sm_100", "gfx942"]:
    """Returns the architecture that tile sizes are chosen for.

    That is gfx942 with ROCm, sm_80 for a CUDA device below compute capability 9.0, sm_100 from 10.0 on, and sm_90
    otherwise or without a device.
    """
    if _assumed:
        return _assumed[-1]
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    return "sm_80" if major < 9 else "sm_90" if major == 9 else "sm_100"


def num_processors(device: torch.device) -> int:
    """Returns the number of multiprocessors, which sets the grid size of kernels that take their work from a list."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _INTERPRETED_PROGRAMS if INTERPRETED else _ASSUMED_PROCESSORS


def power_of_two(n: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least `n`, or `least` if that is larger."""
    return max(least, 1 << max(0, n - 1).bit_length())


def ceil_div(n: int, by: int) -> int:
    """Returns n / by rounded up."""
    return -(-n // by)


def _on_device(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int
) -> Any:
    # Under the interpreter NumPy computes, and would warn about infinities that a device produces silently.
    with np.errstate(all="ignore") if INTERPRETED else contextlib.nullcontext():
        return kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


_start: Launch = _on_device
_assumed: list[Any] = []
"""Architectures set by `record_launches`; the last one counts."""


def _mend_interpreter() -> None:
    """Patches Triton 3.6's interpreter.

    In this interpreter loop bounds are arrays of one element, which NumPy 2.4 and later no longer convert to int. The
    interpreter also replaces every function of the language when a kernel starts, and again for each call of another
    jitted function, which took a quarter of the time. With the patch it replaces only functions not replaced yet.
    """
    from triton.runtime import interpreter

    patch: Callable[[Any, Any], None] = getattr(interpreter, "_patch_lang_tensor")  # noqa: B009 (it is private)
    patch_language: Callable[[Any], Any] = getattr(interpreter, "_patch_lang")  # noqa: B009
    nothing = getattr(interpreter, "_LangPatchScope")  # noqa: B009

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(function: Any) -> Any:
        seen = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        return patch_language(function) if any(tl.core.is_builtin(module.load) for module in seen) else nothing()

    setattr(interpreter, "_patch_lang_tensor", patch_and_mend)  # noqa: B010 (it is private)
    setattr(interpreter, "_patch_lang", patch_once)  # noqa: B010


if INTERPRETED:
    _mend_interpreter()
