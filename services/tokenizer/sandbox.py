"""Helpers for processes that do untrusted work for the tokenizer: frames over pipes, and limits of resources.

Messages are frames: a 4-byte length (big-endian), then msgpack. The module imports little, so that a worker starts in
less than 0.1 s. The parent's side is `worker_process`.
"""

import contextlib
import math
import resource
from typing import BinaryIO, TypeVar

import msgspec

LENGTH_BYTES = 4
OPEN_FILES_MAX = 16
T = TypeVar("T", bound=msgspec.Struct)
_ENCODER = msgspec.msgpack.Encoder()


def pack_frame(message: msgspec.Struct) -> bytes:
    """Returns the encoded message with its length before it."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(source: BinaryIO, decoder: "msgspec.msgpack.Decoder[T]") -> T | None:
    """Returns the next message of a pipe; None at its end."""
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return decoder.decode(source.read(int.from_bytes(head, "big")))


def write_frame(sink: BinaryIO, answer: msgspec.Struct) -> None:
    """Writes a message to a pipe."""
    sink.write(pack_frame(answer))
    sink.flush()


def limit_worker(address_space_bytes: int) -> None:
    """Limits memory, and forbids files and core dumps, for the process that calls it."""
    wanted = {
        resource.RLIMIT_AS: address_space_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES_MAX,
    }
    for limit, value in wanted.items():
        # Some systems define a limit but do not allow it to be set. The parent's time limit still applies there.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


def allow_processor_time(wall_s: float) -> None:
    """Limits the processor time of the next job, so that the kernel ends the worker even if its parent cannot.

    The limit is `wall_s` plus 1 to 2 seconds from now.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + wall_s) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
