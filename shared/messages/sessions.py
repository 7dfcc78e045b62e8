"""Messages about blocks of KV in exported and imported sessions, between gateways and engines.

A gateway moves one block at a time, in pieces, each of which the engine has answered before the next one is sent.
"""

from antiphon.shared.messages.base import Message


class FindBlocks(Message, frozen=True, array_like=True, tag=True):
    """Asks an engine which of these blocks it has on its disk. Answered by `BlocksFound`.

    At most `limits.SESSION_NAMES_MAX` names; none asks only for the form.
    """

    names: tuple[bytes, ...] = ()


class BlocksFound(Message, frozen=True, array_like=True, tag=True):
    """The answer to `FindBlocks`. `names`: those that are there, each followed by the ones that belong to it.

    `form` tells what determines the bytes of the blocks: engines with the same one can use each other's.
    """

    form: str
    block_bytes: int
    names: tuple[bytes, ...] = ()


class ReadBlock(Message, frozen=True, array_like=True, tag=True):
    """Asks an engine for a part of a block on its disk. Answered by `BlockPiece`."""

    name: bytes
    offset: int = 0


class BlockPiece(Message, frozen=True, array_like=True, tag=True):
    """A part of a block, at most `limits.SESSION_PIECE_BYTES`. `size`: of the whole block; 0: it is not there."""

    size: int
    data: bytes = b""


class WriteBlock(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Gives an engine the next part of a block. With the last part it writes the block. Answered by `BlockTaken`."""

    form: str
    name: bytes
    size: int
    offset: int
    data: bytes


class BlockTaken(Message, frozen=True, array_like=True, tag=True):
    """The answer to `WriteBlock`. `refusal`: why the block is not written; empty: it is, or its next part is wanted."""

    refusal: str = ""
