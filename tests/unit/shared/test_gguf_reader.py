"""GGUF files that are damaged, cut off or hostile: each is refused with a message that names the problem."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from antiphon.shared.models.gguf_model.reader import GgufError, GgufModel

WORDS = ["a", "好", "<s>"]


def write(path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """A small file with every kind of field that the product reads."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_rope_freq_base(5e5)
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.0, -1.5, 2.0])
    writer.add_token_types([1, 1, 3])
    writer.add_add_bos_token(False)
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_tensors_are_read(tmp_path: Path) -> None:
    model = GgufModel(write(tmp_path / "m.gguf"))
    assert model.architecture == "llama"
    assert model.integer("llama.context_length") == 128
    assert model.number("llama.rope.freq_base") == 5e5
    assert model.strings("tokenizer.ggml.tokens") == WORDS
    assert model.numbers("tokenizer.ggml.scores") == [0.0, -1.5, 2.0]
    assert model.integers("tokenizer.ggml.token_type") == [1, 1, 3]
    assert model.boolean("tokenizer.ggml.add_bos_token", True) is False
    assert model.optional_integer("missing") is None
    plain, blocks = model.tensors["plain"], model.tensors["blocks"]
    assert (plain.type, plain.shape, plain.data.tolist()) == ("F32", (2, 3), [[0, 1, 2], [3, 4, 5]])
    assert (blocks.type, blocks.shape, blocks.data.shape) == ("Q4_0", (4, 64), (4, 36))


def test_fields_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    model = GgufModel(write(tmp_path / "m.gguf"))
    with pytest.raises(GgufError, match=r"m\.gguf: the field llama\.context_length must be a string, not '128'"):
        model.string("llama.context_length")
    with pytest.raises(GgufError, match=r"the field tokenizer\.ggml\.tokens must be an array of whole numbers"):
        model.integers("tokenizer.ggml.tokens")
    with pytest.raises(GgufError, match=r"the field llama\.block_count is missing"):
        model.integer("llama.block_count")


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as refused:
        GgufModel(path)
    return str(refused.value)


def changed(path: Path, find: bytes, put: bytes, after: int = 0) -> Path:
    """A file with bytes replaced `after` the first place where `find` ends."""
    content = bytearray(write(path).read_bytes())
    at = bytes(content).index(find) + len(find) + after
    content[at : at + len(put)] = put
    path.write_bytes(content)
    return path


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.mark.matrix("S-08")
@pytest.mark.parametrize(
    ("find", "after", "put", "message"),
    [
        (b"GGUF", 0, u32(1), "has version 1 of the format; versions 2 and 3 are served"),
        (b"GGUF", 0, struct.pack(">I", 3), "has big-endian numbers"),
        (b"GGUF", 4, u64(2**40), "claims to have 1099511627776 tensors"),
        (b"GGUF", 12, u64(2**63), "claims to have 2 tensors and 9223372036854775808 fields"),
        (b"tokenizer.ggml.tokens", 8, u64(2**62), "has 4611686018427387904 elements"),
        (b"tokenizer.ggml.tokens", 8, u64(4_000_000), "ends beyond the file"),
        (b"tokenizer.ggml.tokens", 16, u64(2**63), "ends beyond the file"),
        (b"tokenizer.ggml.tokens", 4, u32(9), "has elements of type ARRAY"),
        (b"tokenizer.ggml.tokens", 4, u32(77), "77 is not a valid GGUFValueType"),
        (b"tokenizer.ggml.scores", 8, u64(4_000_000), "where .* bytes are needed at least"),
        (b"general.architecture", 4, u64(2**33), "the string at byte .* has 8589934592 bytes"),
        (b"\5\0\0\0\0\0\0\0plain", 0, u32(5000), "has 5000 dimensions"),
        (b"\5\0\0\0\0\0\0\0plain", 4, u64(0), r"tensor plain \[2, 0\]: rows of 0"),
        (b"\5\0\0\0\0\0\0\0plain", 4, u64(2**61), r"tensor plain \[2, 2305843009213693952\] ends at byte"),
        (b"\5\0\0\0\0\0\0\0plain", 20, u32(4), r"tensor plain \[2, 3\] has the unknown type 4"),
        (b"\5\0\0\0\0\0\0\0plain", 20, u32(2), r"rows of 3 do not consist of blocks of 32"),
        (b"\5\0\0\0\0\0\0\0plain", 24, u64(7), r"tensor plain \[2, 3\] is not aligned: its offset is 7"),
        (b"\5\0\0\0\0\0\0\0plain", 24, u64(2**40), r"tensor plain \[2, 3\] ends at byte 10995"),
        (b"\6\0\0\0\0\0\0\0block", 0, b"\xff", "codec can't decode"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(
    find: bytes, after: int, put: bytes, message: str, tmp_path: Path
) -> None:
    path = changed(tmp_path / "m.gguf", find, put, after)
    with pytest.raises(GgufError, match=message) as refused:
        GgufModel(path)
    assert str(path) in str(refused.value)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    end = len(content) - 4 * 36 % 32  # the writer pads the last tensor
    for size in (*range(0, 200, 7), *range(200, len(content) - 32, 11), end - 20):
        path.write_bytes(content[:size])
        assert "is damaged" in refusal(path) or "is not a GGUF file" in refusal(path), size


@pytest.mark.matrix("S-08")
def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    path, chance = write(tmp_path / "m.gguf"), random.Random(5)
    content = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 1, 127, 255, chance.randrange(256)))
        path.write_bytes(damaged)
        message = ""
        try:
            GgufModel(path)
        except GgufError as error:
            message = str(error)
        assert not message or str(path) in message


def test_other_files_are_no_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>not found</html>" * 4)
    assert refusal(tmp_path / "m.gguf").endswith("is not a GGUF file: it does not begin with GGUF")
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3")
    assert "it ends within its first 24 bytes" in refusal(tmp_path / "m.gguf")
    assert "cannot be read: No such file" in refusal(tmp_path / "none.gguf")


def test_an_alignment_that_is_none_is_refused(tmp_path: Path) -> None:
    def align(size: int) -> Callable[[gguf.GGUFWriter], None]:
        return lambda writer: writer.add_uint32("general.alignment", size)

    assert "non-zero power of two" in refusal(write(tmp_path / "m.gguf", align(48)))
    assert "general.alignment is 4" in refusal(write(tmp_path / "m.gguf", align(4)))


def test_a_model_in_parts_is_opened_by_its_first(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    write(first, lambda writer: writer.add_uint32("split.tensors.count", 3))
    assert "1 of its 2 parts are not there, such as m-00002-of-00002.gguf" in refusal(first)
    other = gguf.GGUFWriter(second, "llama")
    other.add_tensor("third", np.ones((2, 4), np.float32))
    for step in (other.write_header_to_file, other.write_kv_data_to_file, other.write_tensors_to_file, other.close):
        step()
    assert set(GgufModel(first).tensors) == {"plain", "blocks", "third"}
    assert "give the first part of the model, m-00001-of-00002.gguf" in refusal(second)
    write(second)
    assert "there are two tensors" in refusal(first)
