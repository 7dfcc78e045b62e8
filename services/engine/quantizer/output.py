"""The files of a quantized model: one shard for each layer, an index, and the small files of the original.

Shards are written under another name and then renamed, so every existing shard is complete. While a run is unfinished,
`PARTIAL` contains its options; a later run with the same options and input reuses the shards. Called by `run`.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.services.engine.quantizer.job import DTYPES, Job
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE

RECORD = "antiphon_quantization.json"
"""File with the options of the job and the measurements."""
PARTIAL = ".antiphon_quantization.partial.json"
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack", ".onnx")
_NOT_COPIED = ("README.md", RECORD)
_HEADER_LENGTH = 8
_ALIGNMENT = 8


class Output:
    """The directory that a job writes."""

    def __init__(self, job: Job, weight_files: Sequence[Path], shards: int) -> None:
        """Creates or continues the directory. Raises SettingsError if it contains anything else."""
        self.directory, self._shards = job.output, shards
        stamps = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in weight_files}
        state = json.dumps({"options": job.record(), "input": stamps}, sort_keys=True)
        partial = self.directory / PARTIAL
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if any(self.directory.iterdir()):
                self._check_partial(partial, state)
            else:
                partial.write_text(state, encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"-o: {self.directory} cannot be written: {error.strerror}") from error

    def _check_partial(self, partial: Path, state: str) -> None:
        if not partial.is_file():
            raise SettingsError(f"-o: {self.directory} is not empty; name a new directory")
        if partial.read_text(encoding="utf-8") != state:
            raise SettingsError(
                f"-o: {self.directory} holds a run that was interrupted, with other options or another model; continue "
                "it with the same options, or name a new directory"
            )

    def load(self, shard: int) -> dict[str, Tensor] | None:
        """Returns the tensors of a finished shard, None if there is none."""
        path = self._path(shard)
        return load_file(path) if path.is_file() else None

    def save(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a shard."""
        path = self._path(shard)
        hidden = path.with_name(f".{path.name}.tmp")
        save_file(dict(tensors), hidden, {"format": "pt"})
        hidden.replace(path)

    def finish(self, original: Path, config: Mapping[str, Any], record: Mapping[str, Any], *, one_file: bool) -> int:
        """Writes everything but the shards. Returns the bytes of the weights.

        `one_file`: all tensors are also written to `SMOOTHQUANT_FILE`, shard after shard.
        """
        paths = [self._path(shard) for shard in range(self._shards)]
        headers = [_header(path) for path in paths]
        total = sum(_size(entry) for header in headers for entry in header.values())
        weights = {name: path.name for path, header in zip(paths, headers, strict=True) for name in header}
        _write_json(self.directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
        if one_file:
            _join(paths, headers, self.directory / SMOOTHQUANT_FILE)
        _copy_small_files(original, self.directory)
        _write_json(self.directory / "config.json", config)
        _write_json(self.directory / RECORD, record)
        (self.directory / PARTIAL).unlink()
        return total

    def _path(self, shard: int) -> Path:
        return self.directory / f"model-{shard + 1:05}-of-{self._shards:05}.safetensors"


def converted(name: str, tensor: Tensor, job: Job, *, exact: bool = False) -> Tensor:
    """Returns a plain tensor in the type of `-t`, or float32 if it is to be `exact`.

    Raises SettingsError naming it if float16 cannot hold its numbers.
    """
    if not tensor.is_floating_point():
        return tensor
    if exact:
        return tensor.to(torch.float32).contiguous()
    result = tensor.to(getattr(torch, DTYPES[job.dtype])).contiguous()
    if job.dtype == "fp16" and not bool(result.isfinite().all()):
        raise SettingsError(f"-t: {name} has numbers that fp16 cannot hold; use -t bf16")
    return result


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of a safetensors file by the names of tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        header = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _size(entry: Mapping[str, Any]) -> int:
    first, last = entry["data_offsets"]
    return last - first


def _join(paths: Sequence[Path], headers: Sequence[Mapping[str, Mapping[str, Any]]], target: Path) -> None:
    """Writes the tensors of several safetensors files to one, without reading them into memory."""
    joined: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for header in headers:
        for name, entry in header.items():
            joined[name] = {**entry, "data_offsets": [start + offset for offset in entry["data_offsets"]]}
        start += sum(map(_size, header.values()))
    text = json.dumps(joined).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    hidden = target.with_name(f".{target.name}.tmp")
    with hidden.open("wb") as file:
        file.write(len(text).to_bytes(_HEADER_LENGTH, "little") + text)
        for path in paths:
            with path.open("rb") as shard:
                shard.seek(_HEADER_LENGTH + int.from_bytes(shard.read(_HEADER_LENGTH), "little"))
                shutil.copyfileobj(shard, file)
    hidden.replace(target)


def _copy_small_files(original: Path, target: Path) -> None:
    """Copies the files of the tokenizer, the generation settings and the like: all but weights and hidden files."""
    for path in sorted(original.rglob("*")):
        inner = path.relative_to(original)
        hidden = any(part.startswith(".") for part in inner.parts)
        if path.is_file() and not hidden and not path.name.endswith(_WEIGHTS) and path.name not in _NOT_COPIED:
            (target / inner).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / inner)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
