"""A file of packed weights, which a later start maps and reads in place.

A start with such a file packs nothing and allocates no memory for its weights, and the engines of a machine share the
file's pages in the system's page cache. The file's name contains a hash of everything that its contents depend on. The
file is in a directory where no other user can write, and is renamed into place only when it is complete. Only the
latest file of a model is kept. Called by the decoder while it loads; a thread writes the file later.

    length of the header, 8 bytes, little endian | header, msgpack | matrices, each aligned to ALIGNMENT
"""

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from antiphon.services.engine.backends.cpu.compile import SOURCE
from antiphon.services.engine.quantization.choice import WeightForm
from antiphon.services.engine.worker.loading.weight_files import weight_files
from antiphon.shared.cache_dirs import alone_in, is_in_memory, is_private, is_usable, remove_oldest, user_directory
from antiphon.shared.limits import PACKED_BYTES_MIN, PACKED_FILES_MAX
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE

logger = logging.getLogger(__name__)

OFF = "off"
ALIGNMENT = 4096
_CACHE = "~/.cache/antiphon/weights"
_PORTION_BYTES = 4 * 2**20
_LENGTH_BYTES = 8
_SCRATCH = ".writing-"
START_S = 10.0
"""Delay of the writing thread: the time from loading a model until the first requests are answered."""

Name = tuple[int, str, int]
"""Layer, name and expert, as `NativeModel.set_matrix` takes them."""


class _Matrix(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    layer: int
    name: str
    expert: int
    shape: tuple[int, int]
    offset: int
    """Bytes from the beginning of the first matrix."""
    size: int
    quantized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A packed matrix in memory: its shape [out, in] before packing, address and size in bytes of the packed form.

    `quantized`: whether its weights have 8 or 4 bits.
    """

    name: Name
    shape: tuple[int, int]
    address: int
    size: int
    quantized: bool = False


class PackedFile:
    """A mapped file of packed weights. The mapping stays valid while this object lives, even if the file is deleted."""

    def __init__(self, path: Path) -> None:
        """Maps the file. Raises OSError, or ValueError if it is not a complete file of packed weights."""
        with path.open("rb") as file:
            # All pages are mapped now; otherwise the first steps would fault them in one by one.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        matrices = _decode(self._map[_LENGTH_BYTES : _LENGTH_BYTES + length])
        first = _aligned(_LENGTH_BYTES + length)
        if any(first + matrix.offset + matrix.size > self.nbytes for matrix in matrices):
            raise ValueError("it is shorter than its header says")
        # ctypes does not give the address of a read-only mapping; numpy does.
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data + first
        self._matrices = {(m.layer, m.name, m.expert): m for m in matrices}

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self._map)

    def heights(self, layer: int, name: str) -> list[int]:
        """Returns the number of rows of each part of a matrix."""
        parts = {
            part: one.shape[0] for (where, what, part), one in self._matrices.items() if (where, what) == (layer, name)
        }
        return [parts[number] for number in range(len(parts))]

    def piece(self, name: Name) -> Piece:
        """Returns a matrix that the file contains."""
        matrix = self._matrices[name]
        return Piece(
            name=name,
            shape=matrix.shape,
            address=self._address + matrix.offset,
            size=matrix.size,
            quantized=matrix.quantized,
        )


def _decode(header: bytes) -> list[_Matrix]:
    try:
        return msgspec.msgpack.decode(header, type=list[_Matrix])
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


class WeightCache:
    """The cached file of one model: found, or written by a thread after start-up."""

    def __init__(
        self, directory: Path, model_dir: Path, dtype: torch.dtype, form: WeightForm, *, drafts: bool = False
    ) -> None:
        """`drafts`: whether the weights have those of the draft layer."""
        self._directory = directory
        kind = f"{form.name}{' drafts' * drafts}"
        model = hashlib.sha256(f"{model_dir.resolve()}\0{dtype}\0{kind}".encode()).hexdigest()[:16]
        self._path = directory / f"{model}-{_fingerprint(model_dir, dtype, form)[:16]}.packed"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def find(self) -> PackedFile | None:
        """Returns the file that an earlier start wrote; None if there is none that can be trusted."""
        if not self._path.is_file() or not is_private(self._path):
            return None
        try:
            file = PackedFile(self._path)
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used: %s. The weights are packed again", self._path, error)
            with contextlib.suppress(OSError):
                self._path.unlink()
            return None
        # Marks the file as recently used, since the oldest files are removed. A read-only directory keeps all files.
        with contextlib.suppress(OSError):
            os.utime(self._path)
        return file

    def keep(self, pieces: Iterable[Piece], owner: object) -> None:
        """Starts a thread that writes these matrices after start-up. Their memory must stay valid until `close`.

        `owner` is the object that holds this memory. The thread refers to it, so that it is not freed before.
        """
        self._thread = threading.Thread(target=self._write, args=(list(pieces), owner), name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the thread that `keep` started has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stops the writing thread. A file that is not complete is discarded."""
        self._stop.set()
        self.wait()

    def _write(self, pieces: list[Piece], _owner: object) -> None:
        size = sum(piece.size for piece in pieces)
        if size < PACKED_BYTES_MIN or self._stop.wait(START_S):
            return
        try:
            problem = self._problem(size)
            if problem:
                logger.info("packed weights are not kept for the next start: %s", problem)
                return
            with alone_in(self._directory, f"{_SCRATCH}*", wait=False):
                if not self._path.is_file() and self._write_whole(pieces):
                    self._tidy()
        except BlockingIOError:
            logger.debug("another engine is keeping its weights")
        except OSError as error:
            logger.warning("packed weights are not kept for the next start: %s", error)

    def _problem(self, size: int) -> str:
        if not is_usable(self._directory):
            return f"{self._directory} cannot be written, or others can write there"
        if is_in_memory(self._directory):
            return f"{self._directory} is in memory (--weight-cache names another place)"
        if shutil.disk_usage(self._directory).free < 2 * size:
            return f"there is no room for twice {size >> 20} MiB in {self._directory}"
        return ""

    def _write_whole(self, pieces: list[Piece]) -> bool:
        descriptor, scratch = tempfile.mkstemp(dir=self._directory, prefix=_SCRATCH)
        try:
            with os.fdopen(descriptor, "wb", buffering=_PORTION_BYTES) as file:
                _align(file, file.write(_header(pieces)))
                if not all(self._write_piece(file, piece) for piece in pieces):
                    return False
                file.flush()
                os.fsync(file.fileno())
            Path(scratch).replace(self._path)
        finally:
            Path(scratch).unlink(missing_ok=True)
        return True

    def _write_piece(self, file: BinaryIO, piece: Piece) -> bool:
        memory = memoryview((ctypes.c_char * piece.size).from_address(piece.address)).cast("B")
        written = 0
        while written < piece.size:
            started = time.monotonic()
            if self._stop.is_set():
                return False
            # A write ends at a multiple of _PORTION_BYTES: file systems may store and map large aligned writes in
            # large pages.
            written += file.write(memory[written : written + _PORTION_BYTES - file.tell() % _PORTION_BYTES])
            # Pauses as long as the write took: nothing waits for this file, but requests may be waiting for tokens.
            self._stop.wait(time.monotonic() - started)
        _align(file, piece.size)
        return True

    def _tidy(self) -> None:
        model = self._path.name.partition("-")[0]
        for former in self._directory.glob(f"{model}-*.packed"):
            if former != self._path:
                former.unlink(missing_ok=True)
        remove_oldest(self._directory, "*.packed", PACKED_FILES_MAX)


def open_cache(
    asked: str, model_dir: Path, dtype: torch.dtype, form: WeightForm, *, drafts: bool = False
) -> WeightCache | None:
    """Returns the cache of a model in one form of weights; None if it is turned off or the user has no home.

    `asked` is a directory, `OFF`, or empty for the usual directory. `drafts`: whether the draft layer is loaded too.
    """
    # Random weights are drawn faster than they are read.
    directory = None if asked == OFF or form.is_drawn else user_directory(asked, _CACHE)
    return None if directory is None else WeightCache(directory, model_dir, dtype, form, drafts=drafts)


def _fingerprint(model_dir: Path, dtype: torch.dtype, form: WeightForm) -> str:
    """Returns a hash of everything that packed weights depend on.

    This covers the config, name, size and time of the weight files, the form of the weights, and the code that reads,
    rounds and packs them.
    """
    digest = hashlib.sha256(f"{dtype}\0{form.name}".encode())
    digest.update((model_dir / "config.json").read_bytes())
    for path in [model_dir / SMOOTHQUANT_FILE] if form.is_smoothquant else weight_files(model_dir):
        status = path.stat()
        digest.update(f"\0{path.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    here = Path(__file__).parent
    engine = here.parents[1]
    rounding = engine / "quantization"
    for directory in (
        here,
        SOURCE,
        engine / "models",
        engine / "worker",
        engine / "worker" / "loading",
        rounding,
        rounding / "formats",
    ):
        for path in sorted(directory.iterdir()):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _header(pieces: Iterable[Piece]) -> bytes:
    matrices, offset = [], 0
    for piece in pieces:
        layer, name, expert = piece.name
        matrices.append(
            _Matrix(
                layer=layer,
                name=name,
                expert=expert,
                shape=piece.shape,
                offset=offset,
                size=piece.size,
                quantized=piece.quantized,
            )
        )
        offset += _aligned(piece.size)
    header = msgspec.msgpack.encode(matrices)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _align(file: BinaryIO, written: int) -> None:
    file.write(bytes(_aligned(written) - written))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
