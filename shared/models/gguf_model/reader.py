"""Reads GGUF files with the package `gguf`: metadata, and tensors as views of the mapped file.

The package trusts its input: it silently truncates data beyond the end of a file, and creates an object for each
element of an array. `_CheckedReader` checks every length before the package uses it, so that a damaged or hostile file
is refused with a message that names the problem, in time and memory that the file's own header bounds.

    file    magic, version, number of tensors, number of fields | fields | tensors' names, shapes, types, offsets | data
    format  github.com/ggml-org/ggml, docs/gguf.md
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from numpy.typing import NDArray

from antiphon.shared.models.gguf_model.names import PART

_HEADER_BYTES = 24
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIELDS_MAX, _TENSORS_MAX = 10_000, 200_000
_STRING_BYTES_MAX = 16 * 2**20
_ELEMENTS_MAX = 4 * 2**20
"""Longest array: several times the largest vocabulary."""
_DIMENSIONS_MAX = 4
_ALIGNMENT_MULTIPLE = 8


class GgufError(ValueError):
    """A file is not a usable GGUF file. The message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. Types are those of ggml, such as `F16` or `Q4_K`."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Row-major: the elements of the last dimension are contiguous; [out, in] for a matrix."""
    data: NDArray[Any]
    """A view of the mapped file: F32 and F16 as numbers of `shape`, everything else as uint8 [..., bytes of a row]."""


class GgufModel:
    """The open files of a model. Views of tensors stay valid while they are referenced."""

    def __init__(self, path: Path) -> None:
        """Opens a file, and the further parts if it is the first of several. Raises GgufError."""
        self.path = path
        self.paths = part_paths(path)
        files = [_open(part) for part in self.paths]
        self._fields = files[0].fields
        self.tensors: dict[str, GgufTensor] = {}
        for part, file in zip(self.paths, files, strict=True):
            for tensor in file.tensors:
                if tensor.name in self.tensors:
                    raise GgufError(f"{part}: there are two tensors {tensor.name}")
                shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
                self.tensors[tensor.name] = GgufTensor(tensor.name, tensor.tensor_type.name, shape, tensor.data)
        total = self.optional_integer("split.tensors.count")
        if total is not None and total != len(self.tensors):
            raise GgufError(f"{path}: its parts have {len(self.tensors)} tensors instead of {total}")

    @property
    def architecture(self) -> str:
        """The name of the architecture, which is also the first part of the names of its fields."""
        return self.string("general.architecture")

    def has(self, name: str) -> bool:
        """Whether the metadata have a field."""
        return name in self._fields

    def string(self, name: str, default: str | None = None) -> str:
        """Returns a field that is a string. Raises GgufError if it is missing, without a default, or anything else."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a field that is a whole number; see `string`."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, "a whole number", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        """Returns a field that is a whole number, or None if it is missing."""
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a field that is a finite number; see `string`."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise self._wrong(name, "a number", value)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Returns a field that is true or false, or the default if it is missing."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def strings(self, name: str) -> list[str]:
        """Returns a field that is an array of strings; see `string`."""
        return self._array(name, str, "strings")

    def integers(self, name: str) -> list[int]:
        """Returns a field that is an array of whole numbers; see `string`."""
        return self._array(name, int, "whole numbers")

    def numbers(self, name: str) -> list[float]:
        """Returns a field that is an array of numbers; see `string`."""
        return self._array(name, float, "numbers")

    def is_array(self, name: str) -> bool:
        """Whether a field that the metadata have is an array."""
        return self._fields[name].types[0] == GGUFValueType.ARRAY

    def uniform_integer(self, name: str, default: int | None = None, *, some: bool = False) -> int:
        """Returns a whole number, also of a field that has the same one for each layer; see `string`.

        `some`: whether layers may have 0 in place of it.
        """
        if not self.has(name) or not self.is_array(name):
            return self.integer(name, default)
        values = set(self.integers(name)) - ({0} if some else set[int]())
        if some and not values:
            raise self.fail(f"{name} is 0 for all layers")
        if len(values) != 1:
            raise self.fail(f"layers that differ in {name} are not supported")
        return values.pop()

    def fail(self, message: str) -> GgufError:
        """Returns the error with the file's name."""
        return GgufError(f"{self.path}: {message}")

    def _array(self, name: str, kind: type[Any], text: str) -> list[Any]:
        value: Any = self._value(name, None)
        if not isinstance(value, list):
            raise self._wrong(name, f"an array of {text}", value)
        items = cast(list[Any], value)
        if not isinstance(next(iter(items), kind()), kind):  # all elements have one type
            raise self._wrong(name, f"an array of {text}", items)
        return items

    def _value(self, name: str, default: Any) -> Any:
        field = self._fields.get(name)
        if field is None:
            if default is None:
                raise self.fail(f"the field {name} is missing")
            return default
        try:
            if field.types[0] == GGUFValueType.ARRAY and field.types[-1] == GGUFValueType.STRING:
                return _strings(field.parts[-1])
            return field.contents()
        except UnicodeDecodeError as error:
            raise self.fail(f"the field {name} is not UTF-8") from error

    def _wrong(self, name: str, wanted: str, value: Any) -> GgufError:
        return self.fail(f"the field {name} must be {wanted}, not {str(value)[:40]!r}")


def part_paths(path: Path) -> list[Path]:
    """Returns the files of a model that is stored in several, given the first; otherwise the path alone.

    Raises GgufError if a part is missing or the path is not that of the first part.
    """
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05d}-of-{match['count']}.gguf" for number in range(1, count + 1)]
    if path.name != names[0]:
        raise GgufError(f"{path}: give the first part of the model, {names[0]}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise GgufError(f"{path}: {len(missing)} of its {count} parts are not there, such as {missing[0]}")
    return [path.parent / name for name in names]


def _open(path: Path) -> "_CheckedReader":
    try:
        with path.open("rb") as file:
            _check_header(path, file.read(_HEADER_BYTES))
        # Copy on write: the views can be wrapped as tensors, and nothing changes the file.
        return _CheckedReader(path)
    except GgufError:
        raise
    except _DamagedError as error:
        raise GgufError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise GgufError(f"{path} is damaged: {error}") from error


def _check_header(path: Path, header: bytes) -> None:
    if not header.startswith(_MAGIC):
        raise GgufError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    if len(header) < _HEADER_BYTES:
        raise GgufError(f"{path} is damaged: it ends within its first {_HEADER_BYTES} bytes")
    version, tensors, fields = struct.unpack_from("<IQQ", header, len(_MAGIC))
    if version & 0xFFFF == 0:
        raise GgufError(f"{path} has big-endian numbers: convert it for this machine")
    if version not in _VERSIONS:
        raise GgufError(f"{path} has version {version} of the format; versions 2 and 3 are served")
    if tensors > _TENSORS_MAX or fields > _FIELDS_MAX:
        raise GgufError(f"{path} is damaged: it claims to have {tensors} tensors and {fields} fields")


class _DamagedError(Exception):
    """Raised if the sizes in the file are impossible."""


class _CheckedReader(GGUFReader):
    """The package's reader with checks. Arrays are kept in their binary form instead of one object per element."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "c")

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise _DamagedError(f"it ends at byte {len(self.data)}, where {end} bytes are needed at least")
        return super()._get(int(offset), dtype, count, override_order)

    def _get_str(self, offset: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        length = int(self._get(offset, np.uint64)[0])
        if length > _STRING_BYTES_MAX:
            raise _DamagedError(f"the string at byte {offset} has {length} bytes")
        return super()._get_str(offset)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        if length > _ELEMENTS_MAX:
            raise _DamagedError(f"the array at byte {orig_offs} has {length} elements")
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            end = self._end_of_strings(start, length)
            data = self._get(start, np.uint8, end - start)
        elif kind in self.gguf_scalar_to_np:
            data = self._get(start, self.gguf_scalar_to_np[kind], length)
        else:
            raise _DamagedError(f"the array at byte {orig_offs} has elements of type {kind.name}")
        head = self._get(orig_offs, np.uint8, 12)
        return 12 + int(data.nbytes), [head, data], [1], [GGUFValueType.ARRAY, kind]

    def _end_of_strings(self, start: int, count: int) -> int:
        """Returns the first byte after `count` strings, each of which begins with its length in eight bytes."""
        view, size, end = self.data.data, len(self.data), start
        for _ in range(count):
            begin = end + 8
            end = begin + int.from_bytes(view[begin - 8 : begin], "little")
            if end > size or begin > size:
                raise _DamagedError(f"the string at byte {begin - 8} ends beyond the file, at byte {max(begin, end)}")
        return end

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        length = int(self._get(orig_offs, np.uint64)[0])
        dimensions = int(self._get(orig_offs + 8 + min(length, len(self.data)), np.uint32)[0])
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise _DamagedError(f"the tensor at byte {orig_offs} has {dimensions} dimensions")
        return super()._get_tensor_info_field(orig_offs)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        if self.alignment % _ALIGNMENT_MULTIPLE:
            raise _DamagedError(f"general.alignment is {self.alignment}")
        for field in fields:
            self._check_tensor(int(start_offs), field)
        super()._build_tensors(start_offs, fields)

    def _check_tensor(self, start: int, field: ReaderField) -> None:
        """Raises _DamagedError if a tensor's shape, type or place is impossible."""
        _, _, _, dimensions, kind, offset = (part.tolist() for part in field.parts)
        message = f"tensor {field.name} {dimensions[::-1]}"
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
        except (ValueError, KeyError) as error:
            raise _DamagedError(f"{message} has the unknown type {kind[0]}") from error
        elements = int(np.prod(np.array(dimensions, dtype=object)))
        if elements < 1 or dimensions[0] % block:
            raise _DamagedError(f"{message}: rows of {dimensions[0]} do not consist of blocks of {block}")
        if offset[0] % self.alignment:
            raise _DamagedError(f"{message} is not aligned: its offset is {offset[0]}")
        end = start + offset[0] + elements // block * size
        if end > len(self.data):
            raise _DamagedError(f"{message} ends at byte {end}, but the file has {len(self.data)}")


def _strings(data: NDArray[np.uint8]) -> list[str]:
    """Returns the strings of an array, each of which begins with its length."""
    found: list[str] = []
    content, at = data.tobytes(), 0
    while at < len(content):
        end = at + 8 + int.from_bytes(content[at : at + 8], "little")
        found.append(content[at + 8 : end].decode("utf-8"))
        at = end
    return found


PLAIN_TYPES: Sequence[str] = ("F32", "F16", "BF16")
"""Types of one number an element, which need no dequantization."""
