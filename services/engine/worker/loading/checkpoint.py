"""Reads the weight files of a checkpoint: safetensors, PyTorch's `.bin` or GGUF files, one or several.

Returns parameters one at a time, joined and converted, and checks beforehand that no tensor is missing or unused. No
format executes code: the header of safetensors is checked by its library, that of GGUF by `shared/models/gguf_model`,
and `.bin` files are read with PyTorch's restricted reader, which builds tensors and refuses everything else. All
formats are memory-mapped, so only the pages that are read take memory. Called by the weight loader.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from antiphon.services.engine.models.layout import IGNORED_SUFFIXES, KV_SCALE_ENDINGS, Grouping, Parameter, Source
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.weight import QuantizedWeight, stack
from antiphon.services.engine.worker.loading.fused_experts import FusedExperts, stored_apart
from antiphon.services.engine.worker.loading.weight_files import listed, open_safetensors, unusable, weight_files
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE

_GGUF = ".gguf"
_WEIGHT = ".weight"
_MATRIX_DIMENSIONS = 2


class _File(Protocol):
    """An open weight file."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_shape(self, name: str) -> tuple[int, ...]: ...


class _Safetensors:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file: Any = stack.enter_context(open_safetensors(path, "pt"))

    def keys(self) -> Iterable[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())


class _Memory:
    """Tensors in memory, or mapped, with the interface of a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


def _torch_file(path: Path) -> _Memory:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # exceptions for damaged or foreign files have no common base class
        raise unusable(f"{path} cannot be read as PyTorch weights: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise unusable(f"{path} does not hold named tensors.")
    return _Memory(tensors)


class Checkpoint:
    """The open files of a checkpoint. Use as a context manager; tensors read from it stay valid afterwards."""

    def __init__(self, model_dir: Path, method: PreparedMethod | None = None, *, smoothquant: bool = False) -> None:
        """Opens the files. `method`: the checkpoint's quantization, if any; `smoothquant`: only `SMOOTHQUANT_FILE`."""
        self._stack, self._method = ExitStack(), method
        self._files: dict[str, _File] = {}
        """Tensor name → the open file with that tensor."""
        self._fused: dict[str, _File] = {}
        """Tensor name → the open file, for tensors of which parts are among the keys of `_files`."""
        self._apart: dict[str, Parameter] = {}
        """Name of a parameter → the tensors of each expert that the files have in place of one tensor."""
        self._prefix = ""
        """Prefix of the layout's tensor names that is missing in the files; usually empty."""
        paths = [model_dir / SMOOTHQUANT_FILE] if smoothquant else weight_files(model_dir)
        for file in self._opened(paths):
            self._files.update(dict.fromkeys(file.keys(), file))

    @classmethod
    def in_memory(cls, tensors: Mapping[str, Tensor], method: PreparedMethod | None = None) -> "Checkpoint":
        """Returns a checkpoint of tensors, which are not copied. It may be a part of a model, such as a layer."""
        checkpoint = cls.__new__(cls)
        checkpoint._stack, checkpoint._method, checkpoint._prefix = ExitStack(), method, ""
        checkpoint._fused, checkpoint._apart = {}, {}
        checkpoint._files = dict.fromkeys(tensors, _Memory(tensors))
        return checkpoint

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()

    def check(self, parameters: Iterable[Parameter], ignored: frozenset[str]) -> None:
        """Raises `ServiceError` naming tensors that are missing, have the wrong shape or are not used by the model.

        `ignored`: see `ignored_names`.
        """
        every = tuple(parameters)
        self._find_prefix([source.name for parameter in every for source in parameter.sources])
        self._apart = stored_apart(every, lambda name: self._has(self._theirs(name)))
        wanted = {
            source.name: source for parameter in every for source in self._apart.get(parameter.name, parameter).sources
        }
        fused = FusedExperts(map(self._theirs, wanted), self._files, self._stored)
        whole = {name: self._files.pop(name) for name in fused.parts}
        self._fused.update(whole)
        self._files.update(dict.fromkeys(fused.keys(), fused))
        plain = {self._theirs(name): source for name, source in wanted.items() if not self._parts(source)}
        stored = {name for source in wanted.values() for name in self._parts(source).values()}
        missing = sorted((plain.keys() | stored) - self._files.keys())
        if missing:
            raise unusable(f"the checkpoint lacks {listed(missing)}.")
        others = tuple(name for name in ignored if name.endswith("."))
        extra = [
            name
            for name in self._files.keys() - plain.keys() - stored - ignored
            if not name.startswith(others) and not self._ignores(name)
        ]
        if extra:
            raise unusable(f"the checkpoint has tensors that this model does not use: {listed(sorted(extra))}.")
        for source in plain.values():
            self._check_shape(source)

    def read(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the parameter's tensors, joined along their first dimension; quantized ones dequantized.

        On a CPU a single tensor of the right type and order is returned without a copy, as the file's mapped pages.
        """
        weight = self.matrix(parameter, dtype, device)
        return weight if isinstance(weight, Tensor) else weight.dequantized().to(dtype)

    def matrix(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> "Tensor | QuantizedWeight":
        """Returns the parameter like `read`, but quantized if all its tensors are stored with the same quantization."""
        parameter = self._apart.get(parameter.name, parameter)
        parts = [self._weight(source, parameter) for source in parameter.sources]
        return _one(parts, parameter, dtype, device)

    def matrices(
        self, parameter: Parameter, dtype: torch.dtype, device: torch.device, rows: int
    ) -> "list[Tensor | QuantizedWeight]":
        """Returns the parameter like `matrix`, or as several matrices, each to be placed below the one before it.

        There are several if tensors are stored in different ways, which one matrix would represent with more bits. All
        but the last one then have a multiple of `rows` rows.
        """
        parameter = self._apart.get(parameter.name, parameter)
        parts = [self._weight(source, parameter) for source in parameter.sources]
        apart = _apart(parts, rows) if parameter.grouping is None and not parameter.alternating else []
        return [part.to(device) for part in apart] or [_one(parts, parameter, dtype, device)]

    def is_quantized(self, parameter: Parameter) -> bool:
        """Whether any of the parameter's tensors is stored quantized."""
        return any(self._parts(source) for source in self._apart.get(parameter.name, parameter).sources)

    def is_mapped(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `read` returns the mapped pages of the file instead of a copy."""
        parameter = self._apart.get(parameter.name, parameter)
        in_order = parameter.grouping is None and not parameter.alternating
        in_order = in_order and all(source.part is None for source in parameter.sources)
        plain = len(parameter.sources) == 1 and not parameter.transposed and in_order
        plain = plain and not self._parts(parameter.sources[0])
        return device.type == "cpu" and plain and self._tensor(parameter.sources[0].name).dtype == dtype

    def _opened(self, paths: list[Path]) -> Iterable[_File]:
        if paths[0].suffix == _GGUF:
            # Imported here because the package `gguf` is slow to import.
            from antiphon.services.engine.worker.loading.gguf_file import GgufFile
            from antiphon.shared.models.gguf_model.reader import GgufError

            try:
                yield GgufFile(paths)
            except GgufError as error:
                raise unusable(f"{error}.") from error
            return
        for path in paths:
            yield _torch_file(path) if path.suffix == ".bin" else _Safetensors(path, self._stack)

    def stored(self, source: Source) -> tuple[str, Tensor]:
        """Returns a plain tensor's name in the files, and the tensor, which may be mapped pages."""
        return self._theirs(source.name), self._tensor(source.name)

    def others(self, prefixes: tuple[str, ...] = ("",), ends: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
        """Returns the tensors whose names begin and end with one of these, which may be mapped pages."""
        names = sorted(name for name in self._files if name.startswith(prefixes) and name.endswith(ends))
        return {name: self._files[name].get_tensor(name) for name in names}

    def _find_prefix(self, wanted: Iterable[str]) -> None:
        """Finds `_prefix`: in checkpoints of a decoder without its head, every tensor name lacks the first part."""
        for prefix in {f"{name.partition('.')[0]}." for name in wanted}:
            inner = [name for name in wanted if name.startswith(prefix)]
            if len(inner) > 1 and all(self._has(name.removeprefix(prefix)) for name in inner):
                self._prefix = prefix

    def _has(self, name: str) -> bool:
        """Whether the files have a tensor, either plain or as the parts of a quantized one."""
        return name in self._files or bool(self._stored_parts(name))

    def _parts(self, source: Source) -> dict[str, str]:
        """Returns the parts of a quantized matrix by name (such as scales); {} for a plain tensor."""
        if len(source.shape) > _MATRIX_DIMENSIONS and self._method is not None:
            return self._method.parts(self._theirs(source.name), self._files.__contains__)
        return self._stored_parts(self._theirs(source.name)) if len(source.shape) == _MATRIX_DIMENSIONS else {}

    def _stored_parts(self, name: str) -> dict[str, str]:
        if self._method is None or not name.endswith(_WEIGHT):
            return {}
        return self._method.parts(name.removesuffix(_WEIGHT), self._files.__contains__)

    def _ignores(self, name: str) -> bool:
        if name.endswith((*IGNORED_SUFFIXES, *KV_SCALE_ENDINGS)):
            return True
        if self._method is None or not self._method.ignores(name):
            return False
        # A bias of zeros has no effect; some packages write it for layers without bias.
        return not name.endswith(".bias") or not bool(self._files[name].get_tensor(name).any())

    def _weight(self, source: Source, parameter: Parameter) -> "Tensor | QuantizedWeight":
        """Returns a tensor of the checkpoint, or the rows of it that the parameter has; see `_whole`."""
        weight = self._whole(source, parameter)
        if source.part is None:
            return weight
        part = source.part
        rows = torch.arange(weight.shape[0]).unflatten(0, (part.groups, -1))[:, part.first : part.end].flatten()
        return weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)

    def _whole(self, source: Source, parameter: Parameter) -> "Tensor | QuantizedWeight":
        """Returns a tensor of the checkpoint; a matrix as [out, in], even if it is stored transposed.

        A stacked matrix is returned as [experts * out, in].
        """
        parts, transposed = self._parts(source), parameter.transposed
        if not parts or self._method is None:
            tensor = self._tensor(source.name)
            tensor = tensor.transpose(-2, -1) if transposed else tensor
            return tensor.flatten(0, 1) if parameter.stacked else torch.atleast_1d(tensor)
        *experts, first, second = source.shape
        out, width = (second, first) if transposed else (first, second)
        out *= math.prod(experts)
        tensors = {part: self._files[name].get_tensor(name) for part, name in parts.items()}
        try:
            return self._method.weight(tensors, (out, width))
        except ValueError as error:
            raise unusable(f"the quantized tensors of {source.name} do not fit: {error}.") from error

    def _stored(self, name: str) -> Tensor:
        return (self._fused.get(name) or self._files[name]).get_tensor(name)

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


def _one(
    parts: "list[Tensor | QuantizedWeight]", parameter: Parameter, dtype: torch.dtype, device: torch.device
) -> "Tensor | QuantizedWeight":
    """Returns a parameter's tensors as one matrix: quantized if all of them are and have a common form."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts):
        stacked = stack(quantized, max(1, parameter.experts))
        if stacked is not None:
            ordered = _in_order(_indices(stacked), parameter)
            return (stacked if ordered is None else stacked.rows(ordered)).to(device)
    plain = [part.dequantized() if isinstance(part, QuantizedWeight) else part for part in parts]
    joined = _joined(plain, dtype, device)
    ordered = _in_order(joined, parameter)
    return joined if ordered is None else ordered


def _apart(parts: "list[Tensor | QuantizedWeight]", rows: int) -> list[QuantizedWeight]:
    """Returns quantized tensors of different kinds or group sizes, those beside each other that are alike stacked.

    Returns [] if they are one matrix, or cannot be multiplied apart.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedWeight) and part.kind in ("int4", "int8")]
    runs = [list(run) for _, run in itertools.groupby(quantized, lambda part: (part.kind, part.group_size))]
    stacked = [one for run in runs if (one := stack(run)) is not None]
    fit = len(quantized) == len(parts) and len(stacked) == len(runs) > 1
    return stacked if fit and all(part.shape[0] % rows == 0 for part in stacked[:-1]) else []


def _joined(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns tensors joined along their first dimension; a single one of the right type and order without a copy."""
    if len(parts) == 1:
        return parts[0].to(device=device, dtype=dtype).contiguous()
    rows = [part.shape[0] for part in parts]
    joined = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype, device=device)
    for part, place in zip(parts, joined.split(rows), strict=True):
        place.copy_(part)
    return joined


def _indices(weight: QuantizedWeight) -> Tensor:
    return torch.arange(weight.shape[0])


def _in_order(rows: Tensor, parameter: Parameter) -> Tensor | None:
    """Returns a parameter's rows in the decoder's order; None if they already are in this order."""
    if parameter.grouping is not None:
        return _sorted_heads(rows, parameter.grouping)
    if parameter.alternating:
        return rows.unflatten(0, (parameter.sources[0].shape[0], -1, 2)).transpose(1, 2).flatten(0, 2)
    return None


def _sorted_heads(rows: Tensor, grouping: Grouping) -> Tensor:
    """Reorders rows [groups * (queries + 2) * head_dim, …] into all queries', then all keys', then all values' rows."""
    heads = rows.view(grouping.num_groups, -1, grouping.head_dim, *rows.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])
