"""llama.cpp's file of a model, read back by the format's rules."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.peer_systems.make_gguf import write

HIDDEN, HEADS, KV_HEADS, VOCAB = 8, 2, 1, 4
CONFIG = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": 5,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 32, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, 5),
    "model.norm.weight": (HIDDEN,),
}
ADDED = [{"id": 2, "content": "<s>", "special": True}, {"id": 3, "content": "filler", "special": False}]


LFM2 = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "norm_eps": 1e-5}
LFM2_SHAPES = {
    "model.embedding_norm.weight": (HIDDEN,),
    "model.layers.0.operator_norm.weight": (HIDDEN,),
    "model.layers.0.conv.conv.weight": (HIDDEN, 1, 3),
    "model.layers.0.conv.in_proj.weight": (3 * HIDDEN, HIDDEN),
    "model.layers.0.feed_forward.w3.weight": (5, HIDDEN),
    "model.layers.1.self_attn.out_proj.weight": (HIDDEN, HIDDEN),
}
QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN3_5_SHAPES = {
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.linear_attn.in_proj_qkv.weight": (24, HIDDEN),
    "model.layers.0.linear_attn.conv1d.weight": (24, 1, 4),
    "model.layers.0.linear_attn.A_log": (2,),
    "model.layers.0.linear_attn.dt_bias": (2,),
    "model.layers.0.linear_attn.norm.weight": (4,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.1.self_attn.q_norm.weight": (8,),
}


def model(
    directory: Path, family: str, shapes: dict[str, tuple[int, ...]] = SHAPES, **fields: Any
) -> dict[str, torch.Tensor]:
    directory.mkdir()
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "added_tokens": ADDED}
    files = {"config.json": {**CONFIG, **fields, "model_type": family}, "tokenizer.json": tokenizer}
    for name, value in {**files, "tokenizer_config.json": {"chat_template": "{{ x }}"}}.items():
        (directory / name).write_text(json.dumps(value))
    tensors = {name: torch.arange(math.prod(shape)).reshape(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


class Reader:
    """GGUF version 3, as far as the writer uses it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        assert self.take("4s") == b"GGUF"
        assert self.take("I") == 3
        tensors, fields = self.take("Q"), self.take("Q")
        self.fields = {self.string(): self.value(self.take("I")) for _ in range(fields)}
        infos = [self.info() for _ in range(tensors)]
        start = (self.at + 31) // 32 * 32
        self.tensors = {name: self.tensor(shape, kind, start + offset) for name, shape, kind, offset in infos}
        assert all(offset % 32 == 0 for *_, offset in infos)

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(f"{self.take('Q')}s").decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(count)]
        return self.take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    def info(self) -> tuple[str, list[int], int, int]:
        name = self.string()
        shape = [self.take("Q") for _ in range(self.take("I"))]
        return name, shape[::-1], self.take("I"), self.take("Q")

    def tensor(self, shape: list[int], kind: int, start: int) -> torch.Tensor:
        dtype = {0: torch.float32, 30: torch.bfloat16}[kind]
        count = math.prod(shape)
        return torch.frombuffer(bytearray(self.data), dtype=dtype, offset=start, count=count).reshape(shape)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_file_holds_the_models_tensors_and_shape(tmp_path: Path, family: str) -> None:
    tensors = model(tmp_path / "m", family)
    write(tmp_path / "m", tmp_path / "m.gguf")
    read = Reader((tmp_path / "m.gguf").read_bytes())
    assert torch.equal(read.tensors["token_embd.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(read.tensors["blk.0.ffn_down.weight"], tensors["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(read.tensors["output_norm.weight"], tensors["model.norm.weight"].float())
    assert read.fields["general.architecture"] == family
    assert read.fields[f"{family}.attention.head_count_kv"] == KV_HEADS
    assert read.fields[f"{family}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_llamas_queries_and_keys_are_reordered_for_interleaved_rotation_and_qwens_are_not(tmp_path: Path) -> None:
    for family, order in (("llama", [0, 2, 1, 3, 4, 6, 5, 7]), ("qwen2", list(range(8)))):
        tensors = model(tmp_path / family, family)
        write(tmp_path / family, tmp_path / f"{family}.gguf")
        read = Reader((tmp_path / f"{family}.gguf").read_bytes()).tensors
        assert torch.equal(read["blk.0.attn_q.weight"], tensors["model.layers.0.self_attn.q_proj.weight"][order])
        assert torch.equal(read["blk.0.attn_k.weight"], tensors["model.layers.0.self_attn.k_proj.weight"][order[:4]])


def test_lfm2s_layers_say_which_of_them_attend(tmp_path: Path) -> None:
    tensors = model(tmp_path / "m", "lfm2", LFM2_SHAPES, **LFM2)
    write(tmp_path / "m", tmp_path / "m.gguf")
    read = Reader((tmp_path / "m.gguf").read_bytes())
    assert read.fields["lfm2.attention.head_count_kv"] == [0, KV_HEADS]
    assert read.fields["lfm2.shortconv.l_cache"] == 3
    assert read.fields["lfm2.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    layer = "model.layers.0."
    assert torch.equal(read.tensors["token_embd_norm.weight"], tensors["model.embedding_norm.weight"].float())
    assert torch.equal(read.tensors["blk.0.shortconv.conv.weight"], tensors[layer + "conv.conv.weight"][:, 0].float())
    assert torch.equal(read.tensors["blk.0.shortconv.in_proj.weight"], tensors[layer + "conv.in_proj.weight"])
    assert torch.equal(read.tensors["blk.0.ffn_up.weight"], tensors[layer + "feed_forward.w3.weight"])
    assert torch.equal(read.tensors["blk.1.attn_output.weight"], tensors["model.layers.1.self_attn.out_proj.weight"])


def test_qwen3_5s_decays_and_norms_are_stored_as_llama_cpp_multiplies_with_them(tmp_path: Path) -> None:
    tensors = model(tmp_path / "m", "qwen3_5_text", QWEN3_5_SHAPES, **QWEN3_5)
    write(tmp_path / "m", tmp_path / "m.gguf")
    read = Reader((tmp_path / "m.gguf").read_bytes())
    assert read.fields["general.architecture"] == "qwen35"
    assert read.fields["qwen35.rope.dimension_count"] == 2
    assert read.fields["qwen35.full_attention_interval"] == 2
    assert read.fields["qwen35.ssm.inner_size"] == 8
    mixer = "model.layers.0.linear_attn."
    assert torch.allclose(read.tensors["blk.0.ssm_a"], -tensors[mixer + "A_log"].float().exp())
    assert torch.equal(read.tensors["blk.0.ssm_dt.bias"], tensors[mixer + "dt_bias"].float())
    assert torch.equal(read.tensors["blk.0.ssm_conv1d.weight"], tensors[mixer + "conv1d.weight"][:, 0].float())
    assert torch.equal(read.tensors["blk.0.ssm_norm.weight"], tensors[mixer + "norm.weight"].float())
    for ours, theirs in (
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.post_attention_norm.weight"),
        ("model.layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight"),
    ):
        assert torch.equal(read.tensors[theirs], tensors[ours].float() + 1)


def test_the_vocabulary_says_what_is_special(tmp_path: Path) -> None:
    model(tmp_path / "m", "llama")
    write(tmp_path / "m", tmp_path / "m.gguf")
    fields = Reader((tmp_path / "m.gguf").read_bytes()).fields
    assert fields["tokenizer.ggml.tokens"] == ["a", "b", "<s>", "filler"]
    assert fields["tokenizer.ggml.token_type"] == [1, 1, 3, 4]
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == "{{ x }}"


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    model(tmp_path / "m", "llama")
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(SystemExit, match="F32; only bfloat16"):
        write(tmp_path / "m", tmp_path / "m.gguf")
