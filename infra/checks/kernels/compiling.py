"""Compiles Triton kernels without a GPU, and reads their cost from the compiled code.

Launches are recorded instead of executed (`runtime.record_launches`). The arguments of a recorded launch determine the
signature that Triton's own launcher would derive. Triton's backends include assemblers and disassemblers, so CUDA, ROCm
and a driver are not needed. Not for a process with TRITON_INTERPRET=1, in which kernels are interpreted, not compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from antiphon.services.engine.backends.triton.kernels import runtime

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Target:
    """A kind of GPU. `shared_max` is the shared memory in bytes that one program (thread block) may use.

    `shapes`: the architecture that tile sizes are chosen for, see `runtime.architecture`.
    """

    name: str
    gpu: GPUTarget
    shared_max: int
    shapes: str


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024, "sm_80"),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024, "sm_90"),
    Target("sm_100", GPUTarget("cuda", 100, 32), 227 * 1024, "sm_100"),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, "gfx942"),
)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, with everything that determines the compiled code."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], Any]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """The kernel's name without leading underscores and the suffix `_kernel`."""
        return self.kernel.__name__.strip("_").removesuffix("_kernel")

    @property
    def key(self) -> str:
        """A text that is equal for launches with equal compiled code."""
        parts = (sorted(self.signature.items()), sorted(self.constants.items()), sorted(self.attributes))
        return repr((self.kernel.__name__, *parts, self.warps, self.stages))


@dataclass(frozen=True)
class Cost:
    """A kernel's cost: registers per thread, spilled bytes, bytes of shared memory, counts of some instructions.

    `buffers`: in how many buffers in turn it copies tiles to shared memory while it computes; 0: it does not.
    """

    registers: int
    spills: int
    shared: int
    instructions: dict[str, int]
    buffers: int


def launches_of(case: Callable[[], None], target: Target) -> list[Launch]:
    """Returns the distinct launches that `case` makes on a target."""
    found: dict[str, Launch] = {}

    def note(kernel: Any, _: Any, arguments: Any, constants: dict[str, Any], warps: int, stages: int) -> None:
        launch = describe(kernel, arguments, constants, warps, stages)
        found.setdefault(launch.key, launch)

    runtime.record_launches(note, target.shapes)
    case()
    return list(found.values())


def describe(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int) -> Launch:
    """Returns the launch with the specialisation that Triton's launcher would choose for these arguments."""
    signature: dict[str, str] = {}
    values: dict[str, Any] = dict(constants)
    attributes: dict[tuple[int, ...], Any] = {}
    names = [parameter.name for parameter in kernel.params]
    plain = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    assert len(arguments) + len(constants) == len(names), (kernel.__name__, len(arguments), len(constants), len(names))
    for index, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = _ALIGNED
        elif value is None or (value == 1 and isinstance(value, int) and name not in plain):
            signature[name], values[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in plain:
                attributes[(index,)] = _ALIGNED
    signature |= dict.fromkeys(constants, "constexpr")
    return Launch(kernel, {name: signature[name] for name in names}, values, attributes, warps, stages)


def compile_for(launch: Launch, target: Target) -> Cost:
    """Compiles a kernel and returns its cost. Raises Triton's exceptions."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    compiled = triton.compile(source, target=target.gpu, options=options)
    read = _read_cubin if target.gpu.backend == "cuda" else _read_amdgcn
    registers, spills, instructions = read(compiled.asm)
    # Triton's own form of the kernel names each buffer's number of tiles, as in `memdesc<2x32x128xbf16, …>`.
    rings = re.findall(r"local_alloc.*memdesc<(\d+)x\d+x\d+x", compiled.asm["ttgir"])
    return Cost(registers, spills, compiled.metadata.shared, instructions, max(map(int, rings), default=0))


def _read_cubin(asm: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", file.name)
    fields = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {
        name: len(re.findall(rf"\b{name}\b", text))
        for name in ("HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "HMMA", "IMMA", "LDGSTS", "LDL", "STL")
    }
    # Library functions may use some stack without spilling; registers are spilled only if local memory is accessed.
    spills = max(fields["STACK"], fields["LOCAL"]) if counts["LDL"] + counts["STL"] else 0
    return fields["REG"], spills, counts


def _read_amdgcn(asm: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    text = asm["amdgcn"]

    def field(name: str) -> int:
        return max((int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)

    return field("vgpr_count"), 4 * field("vgpr_spill_count"), {"MFMA": len(re.findall(r"\bv_mfma_", text))}


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
