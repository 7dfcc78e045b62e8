"""Reads the weight files of a checkpoint: safetensors or PyTorch's `.bin` files, one or several with an index.

Returns parameters one at a time, joined and converted, and checks beforehand that no tensor is missing or unused.
Neither format executes code: the header of safetensors is checked by its library, and `.bin` files are read with
PyTorch's restricted reader, which builds tensors and refuses everything else. Both formats are memory-mapped, so only
the pages that are read take memory. Called by the weight loader.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.models.layout import IGNORED_SUFFIXES, Grouping, Parameter, Source
from shared.errors import ServiceError

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NAMES_SHOWN = 5


class _File(Protocol):
    """An open weight file."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_shape(self, name: str) -> tuple[int, ...]: ...


class _Safetensors:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        try:
            self._file: Any = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise unusable(f"{path} cannot be read as safetensors: {error}") from error

    def keys(self) -> Iterable[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())


class _TorchFile:
    def __init__(self, path: Path) -> None:
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # exceptions for damaged or foreign files have no common base class
            raise unusable(f"{path} cannot be read as PyTorch weights: {str(error).splitlines()[0]}") from error
        if not isinstance(self._tensors, Mapping) or not all(isinstance(x, Tensor) for x in self._tensors.values()):
            raise unusable(f"{path} does not hold named tensors.")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


class Checkpoint:
    """The open files of a checkpoint. Use as a context manager; tensors read from it stay valid afterwards."""

    def __init__(self, model_dir: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, _File] = {}
        """Tensor name → the open file with that tensor."""
        self._prefix = ""
        """First part of the layout's tensor names that the names in the files leave out; usually empty."""
        for path in weight_files(model_dir):
            file = _TorchFile(path) if path.suffix == ".bin" else _Safetensors(path, self._stack)
            self._files.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def check(self, parameters: Iterable[Parameter], ignored: frozenset[str]) -> None:
        """Raises `ServiceError` naming tensors that are missing, have the wrong shape or are not used by the model."""
        wanted = {source.name: source for parameter in parameters for source in parameter.sources}
        self._find_prefix(wanted)
        named = {self._theirs(name): source for name, source in wanted.items()}
        missing = sorted(named.keys() - self._files.keys())
        if missing:
            raise unusable(f"the checkpoint lacks {_listed(missing)}.")
        extra = [name for name in self._files.keys() - named.keys() - ignored if not name.endswith(IGNORED_SUFFIXES)]
        if extra:
            raise unusable(f"the checkpoint has tensors that this model does not use: {_listed(sorted(extra))}.")
        for source in wanted.values():
            self._check_shape(source)

    def read(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the parameter's tensors, joined along their first dimension.

        On a CPU a single tensor of the right type and order is returned without a copy, as the file's mapped pages.
        """
        parts = [self._tensor(source.name) for source in parameter.sources]
        if parameter.transposed:
            parts = [part.t() for part in parts]
        if len(parts) == 1:
            joined = parts[0].to(device=device, dtype=dtype).contiguous()
        else:
            rows = [part.shape[0] for part in parts]
            joined = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype, device=device)
            for part, place in zip(parts, joined.split(rows), strict=True):
                place.copy_(part)
        return joined if parameter.grouping is None else _sorted_heads(joined, parameter.grouping)

    def is_mapped(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `read` returns the mapped pages of the file instead of a copy."""
        plain = len(parameter.sources) == 1 and not parameter.transposed and parameter.grouping is None
        return device.type == "cpu" and plain and self._tensor(parameter.sources[0].name).dtype == dtype

    def _find_prefix(self, wanted: Iterable[str]) -> None:
        """Finds `_prefix`. Checkpoints of a decoder without its head leave out the first part of every tensor name."""
        for prefix in {f"{name.partition('.')[0]}." for name in wanted}:
            inner = [name for name in wanted if name.startswith(prefix)]
            if len(inner) > 1 and all(name.removeprefix(prefix) in self._files for name in inner):
                self._prefix = prefix

    def _theirs(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _tensor(self, name: str) -> Tensor:
        theirs = self._theirs(name)
        return self._files[theirs].get_tensor(theirs)

    def _check_shape(self, source: Source) -> None:
        theirs = self._theirs(source.name)
        shape = self._files[theirs].get_shape(theirs)
        if shape != source.shape:
            raise unusable(f"tensor {source.name} has shape {shape}, but config.json asks for {source.shape}.")


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the single weight file, or the files listed in the index. Prefers safetensors if there are both kinds."""
    for single, index in zip(_SINGLES, _INDICES, strict=True):
        if (model_dir / single).is_file():
            return [model_dir / single]
        if (model_dir / index).is_file():
            return _indexed(model_dir, model_dir / index)
    raise unusable(f"{model_dir} has neither {_SINGLES[0]} nor {_INDICES[0]}, nor the same as {_SINGLES[1]}.")


def unusable(message: str) -> ServiceError:
    """Returns the error for weights that cannot be used."""
    return ServiceError("invalid_value", f"The model cannot be loaded: {message}", param="model")


def _indexed(model_dir: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise unusable(f"{index} is not an index of weight files.") from error
    unsafe = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if unsafe:
        raise unusable(f"{index} names files outside the model directory: {_listed(unsafe)}.")
    lost = [name for name in names if not (model_dir / name).is_file()]
    if lost:
        raise unusable(f"{index} names files that are not there: {_listed(lost)}.")
    return [model_dir / name for name in names]


def _sorted_heads(rows: Tensor, grouping: Grouping) -> Tensor:
    """Reorders rows [groups * (queries + 2) * head_dim, …] into all queries', then all keys', then all values' rows."""
    heads = rows.view(grouping.num_groups, -1, grouping.head_dim, *rows.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(str, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
