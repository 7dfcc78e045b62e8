"""Bytes of messages: round trips, other msgpack readers, hostile input, token lists, the golden file."""

import json
import random
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.shared import codec, limits
from antiphon.shared.messages import Ack, Cancel, DetokenizeReply, Done, Message, Submit
from tests.samples import message_types, sample, strategy

GOLDEN = Path(__file__).parents[2] / "golden" / "messages.json"
ALL = codec.Decoder(message_types())
by_type = pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)


def plain(value):
    """What any msgpack library makes of a message."""
    return msgpack.unpackb(value, raw=False, strict_map_key=True)


def as_list(value):
    """A struct as the nested lists that it should be on the wire."""
    if isinstance(value, msgspec.Struct):
        tag = [type(value).__name__] if isinstance(value, Message) or value.__struct_config__.tag else []
        return tag + [as_list(getattr(value, name)) for name in value.__struct_fields__]
    return [as_list(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.matrix("P-09")
@by_type
@settings(max_examples=20)
@given(data=st.data())
def test_every_message_survives_the_round_trip_and_is_an_array_to_any_reader(kind, data):
    message = data.draw(strategy(kind))
    encoded = codec.encode(message)
    assert codec.Decoder((kind,)).decode(encoded) == ALL.decode(encoded) == message
    assert plain(encoded) == as_list(message)


def packed(document: object) -> bytes:
    data = msgpack.packb(document)
    assert data is not None
    return data


@pytest.mark.matrix("P-09")
@by_type
def test_a_reader_skips_fields_that_a_newer_writer_has_appended(kind):
    message = sample(kind)
    newer = packed([*plain(codec.encode(message)), "a field of the future", {"nested": [1]}])
    assert codec.Decoder((kind,)).decode(newer) == message


@by_type
def test_the_bytes_of_every_message_are_the_golden_ones(kind, update_golden):
    """Fields are only ever appended: what an older release has written must be read."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"messages": {}}
    name, fields = kind.__name__, list(kind.__struct_fields__)
    known = golden["messages"].get(name)
    if known is not None and golden.get("protocol") == limits.PROTOCOL_VERSION:
        assert fields[: len(known["fields"])] == known["fields"], "a new major version of the protocol is needed"
        assert isinstance(codec.Decoder((kind,)).decode(bytes.fromhex(known["hex"])), kind)
    entry = {"fields": fields, "hex": codec.encode(sample(kind)).hex()}
    if update_golden:
        golden = {"protocol": limits.PROTOCOL_VERSION, "messages": {**golden["messages"], name: entry}}
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    assert update_golden or known == entry, "if the change is meant, run pytest with --update-golden"


def test_the_golden_file_has_no_message_that_is_gone():
    names = {kind.__name__ for kind in message_types()}
    assert set(json.loads(GOLDEN.read_text())["messages"]) == names


@pytest.mark.matrix("S-04")
@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_decode_error(data):
    try:
        ALL.decode(data)
    except codec.DecodeError:
        return


@pytest.mark.matrix("S-04")
@by_type
def test_damaged_messages_raise_nothing_but_decode_error(kind):
    draw, good = random.Random(kind.__name__), codec.encode(sample(kind))
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        hostile = bytes(data[: draw.randint(0, len(data))]) if draw.random() < 0.3 else bytes(data)
        try:
            assert isinstance(ALL.decode(hostile), Message)
        except codec.DecodeError:
            continue


@pytest.mark.matrix("S-04")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x91" * 200_000,
        b"\x81\x01" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\xa3Ack\xa2\xff\xfe",
        b"\x92\xa3Ack" + b"\x91" * 100_000,
        b"\x93\xa3Ack\xa1x" + b"\x91" * 100_000,
        b"\x93\xa3Ack\xa1x\xdd\xff\xff\xff\xff",
        b"\x90",
        b"\x91\xa3Ack",
        b"\x92\xa3Ack\x01",
        b"\x92\xa3ack\xa1x",
        b"\x93\xa6Cancel\xa1x\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        codec.encode(Ack("x")) + b"\x00",
    ],
)
def test_hostile_bytes_raise_decode_error(data):
    with pytest.raises(codec.DecodeError):
        ALL.decode(data)


@pytest.mark.matrix("B-17")
def test_a_decoder_accepts_only_the_types_it_was_made_for():
    decoder = codec.Decoder((Cancel, Done))
    assert decoder.decode(codec.encode(Done("r", 1))) == Done("r", 1)
    with pytest.raises(codec.DecodeError, match=r"Cancel.*Done"):
        decoder.decode(codec.encode(Ack("r")))
    with pytest.raises(codec.DecodeError):
        codec.Decoder((Cancel,)).decode(codec.encode(Done("r", 1)))


def test_an_enumerated_field_accepts_no_other_value():
    reply = plain(codec.encode(sample(Submit)))
    assert isinstance(ALL.decode(packed(reply)), Submit)
    with pytest.raises(codec.DecodeError):
        ALL.decode(packed(["SubmitReply", "r", 1, "perhaps", "e", "b"]))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_packed_token_ids_are_little_endian_u32(ids):
    packed = codec.pack_ids(ids)
    assert codec.unpack_ids(packed) == ids
    assert packed == b"".join(number.to_bytes(4, "little") for number in ids)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
def test_a_packed_token_list_of_an_odd_length_is_a_decode_error(length):
    with pytest.raises(codec.DecodeError):
        codec.unpack_ids(bytes(length))


def test_batches_are_cut_to_their_bound_and_a_single_part_may_be_larger():
    def pack(items):
        return DetokenizeReply("r", "".join(items))

    items = ["x" * (limits.BATCH_BYTES_MAX // 3), "y" * (2 * limits.BATCH_BYTES_MAX), "z", "w"]
    parts = list(codec.encode_split(pack, items))
    assert [item for part, _ in parts for item in part] == items
    assert [len(part) for part, _ in parts] == [1, 1, 2]
    assert all(data == codec.encode(pack(part)) for part, data in parts)
    assert all(len(data) <= limits.BATCH_BYTES_MAX for part, data in parts if len(part) > 1)
