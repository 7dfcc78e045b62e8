"""Messages between the first rank of an engine and its other ranks: length-prefixed msgpack over a socket.

The socket is one of a pair between processes of one machine, and a TCP connection between machines (`joining`). The
first rank sends the address at which the ranks meet, then plans, grammars, adapters and embeddings of images; the
others answer each plan with a digest of their result. Blocking; used by `multiproc` and `rank`.
"""

import contextlib
import hashlib
import socket
import struct
from typing import TypeVar

import msgspec

from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.executor.adapter_parts import AdapterMessage
from antiphon.services.engine.executor.image_parts import EmbeddingsPart
from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.shared.messages import DeviceMemory
from antiphon.shared.parameters.grammar import Grammar

_LENGTH = struct.Struct("<Q")
MESSAGE_BYTES_MAX = 1 << 30
T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Command: meet the other ranks, and load the model for `max_num_seqs` sequences, the hidden one included."""

    meeting: Meeting
    max_num_seqs: int


class RunPlan(msgspec.Struct, frozen=True, tag=True):
    """Command: run a plan."""

    plan: StepPlan


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Command: collect the oldest plan that the first rank has not collected, unless this rank has collected it."""


class CompileGrammar(msgspec.Struct, frozen=True, tag=True):
    """Command: compile a grammar, for sequences of later plans."""

    grammar: Grammar


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Reply: the model is loaded. `configuration` and `content`: see `EngineFacts`; they are the same on every rank."""

    num_blocks: int
    configuration: str
    content: str
    gpus: tuple[DeviceMemory, ...] = ()


class Computed(msgspec.Struct, frozen=True, tag=True):
    """Reply: a plan has been computed. `gpus`: memory of the rank's GPUs, if it has changed since the last reply."""

    step: int
    digest: bytes
    gpus: tuple[DeviceMemory, ...] = ()


Command = Start | RunPlan | Collect | CompileGrammar | AdapterMessage | EmbeddingsPart
Reply = Loaded | Computed


class ChannelClosed(EOFError):
    """Raised if the other process has ended."""


class Channel:
    """One end of a connected socket.

    A message of more than MESSAGE_BYTES_MAX bytes, or one that is neither a command nor a reply, is treated like a
    closed channel.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._commands = msgspec.msgpack.Decoder(Command)
        self._replies = msgspec.msgpack.Decoder(Reply)

    def send(self, message: Command | Reply) -> None:
        """Sends a message. Raises ChannelClosed if the other process has ended."""
        try:
            send_frame(self.socket, msgspec.msgpack.encode(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def command(self) -> Command:
        """Waits for a command. Raises ChannelClosed when the first rank has ended."""
        return self._decoded(self._commands)

    def reply(self) -> Reply:
        """Waits for a reply. Raises ChannelClosed if the other rank has ended."""
        return self._decoded(self._replies)

    def hang_up(self) -> None:
        """Ends the connection, from any thread. A thread that waits for a message gets ChannelClosed."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this end, which makes the other process exit."""
        self.socket.close()

    def _decoded(self, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        try:
            return decoder.decode(receive_frame(self.socket, MESSAGE_BYTES_MAX))
        except msgspec.DecodeError as error:
            raise ChannelClosed(f"a message that cannot be read: {error}") from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error


def send_frame(end: socket.socket, data: bytes) -> None:
    """Sends bytes with their length. Raises OSError."""
    end.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(end: socket.socket, bytes_max: int) -> bytes:
    """Returns the bytes of the next frame. Raises OSError, or ChannelClosed if it has more than `bytes_max` bytes."""
    (size,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    if size > bytes_max:
        raise ChannelClosed(f"a message of {size} bytes")
    return _exactly(end, size)


def _exactly(end: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = end.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ChannelClosed("the other process has ended")
        found += part
    return bytes(found)


def digest_of(result: StepResult) -> bytes:
    """Returns a digest of the tokens of a result. Ranks that computed the same have the same digest."""
    return hashlib.blake2b(msgspec.msgpack.encode((result.step, result.token_ids)), digest_size=8).digest()
