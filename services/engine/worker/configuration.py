"""Computes a hash of everything in an engine, besides its weights, that can change which tokens it generates.

A worker computes the hash once at start-up. The hash is published as `EngineFacts.configuration` and in heartbeats, and
is part of the `system_fingerprint` of responses. Two engines with equal hashes run the same code, with the same data
types, on the same kind of hardware. The hash excludes settings that do not change tokens by design (block size, batch
sizes, prefix caching, draft tokens).
"""

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import torch

ENGINE = Path(__file__).resolve().parents[1]
_DIGITS = 16
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf"})
SAMPLES, SAMPLE_BYTES = 65, 4096
_LIBRARIES = ("torch", "transformers", "triton", "numpy")
"""Packages whose code takes part in the forward pass or in sampling."""


def configuration_hash(model_dir: Path, backend: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """Returns the hash as 16 hexadecimal digits.

    `backend` names the implementation and its hardware, including the instruction set. The hash covers the model's
    config.json, which states the quantization of the checkpoint.
    """
    digest = hashlib.sha256()
    for part in (backend, str(dtype), str(cache_dtype), software_version()):
        digest.update(part.encode() + b"\0")
    digest.update((model_dir / "config.json").read_bytes())
    return digest.hexdigest()[:_DIGITS]


def numerics(backend: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """Returns what decides the last bits of results, for people and for comparisons: see `EngineFacts.numerics`.

    `backend`: as for `configuration_hash`.
    """
    kinds = [str(one).removeprefix("torch.") for one in (dtype, cache_dtype)]
    return f"{backend}, {kinds[0]}, kv {kinds[1]}, torch {torch.__version__}"


def content_hash(model_dir: Path, form: str, dtype: torch.dtype) -> str:
    """Returns a hash, as 16 hexadecimal digits, of everything that determines KV values, except the hardware.

    These are the model's config.json, its weights, their quantization (`form`) and the compute data type. Of the weight
    files only names, sizes and SAMPLES samples of the content are hashed, so that large files take no time; different
    weights differ in at least some samples.
    """
    return _hashed(f"{form}\0{dtype}\0", model_dir)


def weights_digest(model_dir: Path) -> str:
    """Returns a hash like `content_hash`, of the files alone: equal for all data types and quantizations."""
    return _hashed("", model_dir)


def _hashed(prefix: str, model_dir: Path) -> str:
    digest = hashlib.sha256(prefix.encode())
    digest.update((model_dir / "config.json").read_bytes())
    for path in sorted(path for path in model_dir.iterdir() if path.suffix in WEIGHT_SUFFIXES):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for place in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:_DIGITS]


def torch_backend(device: torch.device) -> str:
    """Returns a name for PyTorch's own operations on this hardware.

    The name has the number of threads, because that number decides how PyTorch splits a sum on a CPU.
    """
    return f"torch {hardware(device)} {torch.get_num_threads()}"


def hardware(device: torch.device) -> str:
    """Returns the instruction set that PyTorch uses on a CPU, or the name of the GPU."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return torch.cuda.get_device_name(device)


@functools.cache
def software_version() -> str:
    """Returns library versions and a hash of the engine's Python source, which changes with every release."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.relative_to(ENGINE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{' '.join(map(_version, _LIBRARIES))} {digest.hexdigest()}"


def _sources() -> Iterator[Path]:
    """Yields the engine's Python files. The C++ sources are left out: the name of their library has a hash of them."""
    yield from sorted(ENGINE.rglob("*.py"))


def _version(package: str) -> str:
    try:
        return f"{package}={importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}=none"
