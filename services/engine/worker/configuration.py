"""A hash of everything in an engine, beside its weights, that can change which tokens it generates.

A worker computes it once when it has loaded its model; it travels as `EngineFacts.configuration` and in heartbeats, and
is part of the `system_fingerprint` of responses. Two engines with equal hashes compute with the same code, in the same
types, on the same kind of hardware. Settings that by design leave the tokens alone (block size, batch sizes, prefix
caching, draft tokens) are not in it.
"""

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import torch

ENGINE = Path(__file__).resolve().parents[1]
_DIGITS = 16
_LIBRARIES = ("torch", "transformers", "triton", "numpy")
"""Packages whose code computes or samples."""


def configuration_hash(model_dir: Path, backend: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """16 hexadecimal digits.

    `backend` names the implementation and the hardware that it computes on, instruction set included. The model's
    config.json is part of the hash: a checkpoint's quantization is stated there.
    """
    digest = hashlib.sha256()
    for part in (backend, str(dtype), str(cache_dtype), software_version()):
        digest.update(part.encode() + b"\0")
    digest.update((model_dir / "config.json").read_bytes())
    return digest.hexdigest()[:_DIGITS]


def torch_backend(device: torch.device) -> str:
    """PyTorch's own operations. The number of threads is part: it decides how PyTorch cuts up a sum on a CPU."""
    return f"torch {hardware(device)} {torch.get_num_threads()}"


def hardware(device: torch.device) -> str:
    """The instruction set that PyTorch uses on a CPU, or the name of a GPU."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return torch.cuda.get_device_name(device)


@functools.cache
def software_version() -> str:
    """Versions of the libraries and a hash of the engine's own Python source, which changes with every release."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.relative_to(ENGINE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{' '.join(map(_version, _LIBRARIES))} {digest.hexdigest()}"


def _sources() -> Iterator[Path]:
    """The C++ of the CPU backend is not among them: its library's name has a hash of it."""
    yield from sorted(ENGINE.rglob("*.py"))


def _version(package: str) -> str:
    try:
        return f"{package}={importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}=none"
