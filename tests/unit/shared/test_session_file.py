"""A session file gives back what was sealed; every kind of damage is refused before anything of it is given out."""

import hashlib
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.session_file import frames, sealing
from antiphon.shared.session_file.frames import FileBlock, FrameReader, SessionHead, pack_block, pack_head
from antiphon.shared.session_file.sealing import CHUNK_BYTES, HEADER_BYTES, Header, Opener, Sealer, check_key

KEY = b"the key of the tests"
HEAD = SessionHead(created=1.0, content=msgspec.Raw(b"{}"), weights="w", kv_form="f", block_size=16, num_blocks=2)
SIZES = st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 77])
CUTS = st.lists(st.integers(1, 2 * CHUNK_BYTES), max_size=8)


@pytest.fixture(autouse=True)
def cheap_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parameters, which cost a quarter of a second, are those of the files in the system tests."""
    monkeypatch.setattr(sealing, "_COST", 2)


def sealed(plain: bytes, key: bytes = KEY) -> bytes:
    sealer = Sealer(key)
    return (
        sealer.header + sealer.feed(plain[: len(plain) // 3]) + sealer.feed(plain[len(plain) // 3 :]) + sealer.finish()
    )


def opened(data: bytes, cuts: list[int] | None = None, key: bytes = KEY, out: list[bytes] | None = None) -> bytes:
    """Decrypts a file that arrives in pieces. `out` gets what is given out before an error."""
    found = [] if out is None else out
    opener, at = Opener(key, Header(data[:HEADER_BYTES])), HEADER_BYTES
    for size in cuts or []:
        found.append(opener.feed(data[at : at + size]))
        at += size
    found.append(opener.feed(data[at:]))
    opener.finish()
    return b"".join(found)


def pattern(size: int) -> bytes:
    return (hashlib.sha256(size.to_bytes(4, "big")).digest() * (size // 32 + 1))[:size]


@given(SIZES, CUTS)
@settings(deadline=None, max_examples=40)
def test_what_was_sealed_comes_back(size: int, cuts: list[int]) -> None:
    assert opened(sealed(pattern(size)), cuts) == pattern(size)


def test_two_files_of_the_same_plaintext_and_key_share_nothing() -> None:
    one, two = sealed(b"x" * 200), sealed(b"x" * 200)
    assert one[HEADER_BYTES + 4 :] != two[HEADER_BYTES + 4 :]
    with pytest.raises(ServiceError, match="chunk 0 is damaged"):
        opened(header_of(one, two), key=KEY)


def header_of(one: bytes, two: bytes) -> bytes:
    """A chunk of one file behind the header of another one with the same key."""
    return two[:HEADER_BYTES] + one[HEADER_BYTES:]


def chunks_of(data: bytes) -> list[bytes]:
    found, at = list[bytes](), HEADER_BYTES
    while at < len(data):
        (prefix,) = struct.unpack_from("<I", data, at)
        end = at + 4 + (prefix & 0x7FFFFFFF) + 16
        found.append(data[at:end])
        at = end
    return found


Change = Callable[[list[bytes]], list[bytes]]
CHANGES: dict[str, tuple[Change, str]] = {
    "exchanged": (lambda chunks: [chunks[1], chunks[0], *chunks[2:]], "chunk 0 is damaged"),
    "left out": (lambda chunks: [chunks[0], *chunks[2:]], "chunk 1 is damaged"),
    "repeated": (lambda chunks: [chunks[0], *chunks], "chunk 1 is damaged"),
    "without the last": (lambda chunks: chunks[:-1], "truncated"),
    "only the last": (lambda chunks: chunks[-1:], "chunk 0 is damaged"),
    "none": (lambda chunks: [], "truncated"),
    "appended": (lambda chunks: [*chunks, chunks[-1]], "data after its end"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_chunks_in_another_order_or_number_are_refused(name: str) -> None:
    change, reason = CHANGES[name]
    data = sealed(pattern(3 * CHUNK_BYTES + 5))
    with pytest.raises(ServiceError, match=reason):
        opened(data[:HEADER_BYTES] + b"".join(change(chunks_of(data))))


@cache
def long() -> bytes:
    return sealed(pattern(2 * CHUNK_BYTES + 100))


@given(st.integers(0, 8 * 10**9), CUTS)
@settings(deadline=None, max_examples=150)
def test_every_changed_bit_is_refused_and_nothing_wrong_is_given_out(bit: int, cuts: list[int]) -> None:
    place, bit = bit // 8 % len(long()), bit % 8
    changed = bytearray(long())
    changed[place] ^= 1 << bit
    out = list[bytes]()
    with pytest.raises(ServiceError) as refused:
        opened(bytes(changed), cuts, out=out)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "file")
    assert pattern(2 * CHUNK_BYTES + 100).startswith(b"".join(out))


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_every_changed_byte_of_the_header_is_refused(place: int) -> None:
    changed = bytearray(long())
    changed[place] ^= 0x40
    reasons = ("no file of", "has version", "header is damaged")
    with pytest.raises(ServiceError, match="|".join(reasons)):
        opened(bytes(changed))


@given(st.integers(0, 10**9), CUTS)
@settings(deadline=None, max_examples=100)
def test_every_truncation_is_called_so(end: int, cuts: list[int]) -> None:
    out = list[bytes]()
    with pytest.raises(ServiceError, match=r"truncated|no file of"):
        opened(long()[: end % len(long())], cuts, out=out)
    assert pattern(2 * CHUNK_BYTES + 100).startswith(b"".join(out))


def test_a_wrong_key_is_told_from_damage() -> None:
    with pytest.raises(ServiceError, match="made with another key") as refused:
        opened(long(), key=KEY + b"!")
    assert refused.value.param == "key"


@pytest.mark.parametrize("passphrase", ["", "elevenchars", "ä" * 20, "a" * 1025, "with\nnewline"])
def test_a_weak_or_unprintable_key_is_refused(passphrase: str) -> None:
    with pytest.raises(ServiceError, match="openssl rand"):
        check_key(passphrase)


def test_memory_is_bounded_by_a_chunk() -> None:
    sealer = Sealer(KEY)
    data = sealer.header + b"".join(sealer.feed(b"x" * 999) for _ in range(500)) + sealer.finish()
    opener = Opener(KEY, Header(data))
    for at in range(HEADER_BYTES, len(data), 777):
        opener.feed(data[at : at + 777])
        assert len(opener._rest) < CHUNK_BYTES + 777 + 32
        assert len(sealer._rest) <= CHUNK_BYTES
    opener.finish()


# --- frames -----------------------------------------------------------------------------------------------------------

BLOCKS = st.lists(
    st.builds(FileBlock, st.integers(0, 2**32 - 1), st.sampled_from([b"", b"\1\0"]), st.binary(min_size=1))
)


@given(BLOCKS, CUTS)
@settings(deadline=None, max_examples=40)
def test_frames_come_back_however_they_are_cut(blocks: list[FileBlock], cuts: list[int]) -> None:
    data, reader, found = pack_head(HEAD) + b"".join(map(pack_block, blocks)), FrameReader(), list[Any]()
    at = 0
    for size in cuts:
        found += reader.feed(data[at : at + size])
        at += size
    found += reader.feed(data[at:])
    reader.finish()
    assert found == [HEAD, *blocks]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not complete"),
        (pack_head(HEAD)[:-1], "not complete"),
        (pack_head(HEAD) + pack_block(FileBlock(0, b"", b"x"))[:-1], "not complete"),
        (pack_block(FileBlock(0, b"", b"x")), "does not know"),
        (pack_head(HEAD) + pack_head(HEAD), "does not know"),
        (pack_head(HEAD) + struct.pack("<BI", 2, limits.SESSION_FRAME_BYTES + 1), "does not know"),
        (pack_head(HEAD) + pack_block(FileBlock(0, b"", b"")), "empty block"),
        (pack_head(HEAD) + pack_block(FileBlock(0, b"abc", b"x")), "name that is too long"),
        (struct.pack("<BI", 1, 2) + b"{}", "cannot be read"),
    ],
)
def test_what_no_export_writes_is_refused(data: bytes, reason: str) -> None:
    reader = FrameReader()

    def read() -> None:
        reader.feed(data)
        reader.finish()

    with pytest.raises(ServiceError, match=reason):
        read()


def test_the_head_has_the_recorded_request() -> None:
    with pytest.raises(ServiceError, match="no recorded request"):
        frames.content_of(HEAD)
