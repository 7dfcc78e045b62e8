"""Messages between the first rank of an engine and its other ranks: length-prefixed msgpack over a socket pair.

The first rank sends plans and grammars; the others answer each plan with a digest of their result. Blocking; used by
`multiproc` and `rank`.
"""

import hashlib
import socket
import struct

import msgspec

from services.engine.core.plan import StepPlan, StepResult
from shared.grammar import Grammar

_LENGTH = struct.Struct("<Q")
MESSAGE_BYTES_MAX = 1 << 30


class RunPlan(msgspec.Struct, frozen=True, tag=True):
    """Carry out a plan."""

    plan: StepPlan


class CompileGrammar(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar, for sequences of later plans."""

    grammar: Grammar


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    num_blocks: int


class Computed(msgspec.Struct, frozen=True, tag=True):
    """A plan has been carried out."""

    step: int
    digest: bytes


Command = RunPlan | CompileGrammar
Reply = Loaded | Computed


class ChannelClosed(EOFError):
    """The other process has ended."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._commands = msgspec.msgpack.Decoder(Command)
        self._replies = msgspec.msgpack.Decoder(Reply)

    def send(self, message: Command | Reply) -> None:
        """Sends a message. Raises ChannelClosed if the other process has ended."""
        data = msgspec.msgpack.encode(message)
        try:
            self._end.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def command(self) -> Command:
        """Waits for a command. Raises ChannelClosed when the first rank has ended."""
        return self._commands.decode(self._message())

    def reply(self) -> Reply:
        """Waits for a reply. Raises ChannelClosed if the other rank has ended."""
        return self._replies.decode(self._message())

    def close(self) -> None:
        """Closes this end; the other process ends."""
        self._end.close()

    def _message(self) -> bytes:
        (size,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
        if size > MESSAGE_BYTES_MAX:
            raise ChannelClosed(f"a message of {size} bytes")
        return self._bytes(size)

    def _bytes(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self._end.recv(min(size - len(found), 1 << 20))
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the other process has ended")
            found += part
        return bytes(found)


def digest_of(result: StepResult) -> bytes:
    """Returns a digest of the tokens of a result. Ranks that computed the same have the same digest."""
    return hashlib.blake2b(msgspec.msgpack.encode((result.step, result.token_ids)), digest_size=8).digest()
