"""What the configs of single families mean, where parity with a small model cannot show it."""

from typing import Any

import pytest

from services.engine.models.description import DecoderDescription
from services.engine.models.registry import find_family
from shared.errors import ServiceError

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def describe(architecture: str, **fields: Any) -> DecoderDescription:
    config = {**SIZES, "architectures": [architecture], **fields}
    return find_family(config).describe({name: value for name, value in config.items() if value is not None})


def test_gemmas_windows_alternate_by_their_pattern() -> None:
    assert describe("Gemma2ForCausalLM", sliding_window=8).sliding_windows == (8, None) * 3
    third = describe("Gemma3ForCausalLM", sliding_window=8, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert third.sliding_windows == (8,) * 5 + (None,)
    assert third.rope is not None
    assert third.local_rope is not None
    assert (third.rope.theta, third.rope.factor, third.local_rope.theta) == (1e6, 8.0, 1e4)
    assert third.local_rope.kind == "default"
    assert third.max_positions == 128


def test_longrope_is_offered_up_to_the_original_context() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    description = describe("Phi3ForCausalLM", original_max_position_embeddings=32, rope_scaling=scaling)
    assert description.rope is not None
    assert (description.max_positions, description.rope.kind) == (32, "longrope")


def test_qwen_that_stretches_beyond_its_training_stays_within_it() -> None:
    fields = {"intermediate_size": 192, "seq_length": 64}
    assert describe("QWenLMHeadModel", **fields).max_positions == 128
    assert describe("QWenLMHeadModel", use_logn_attn=True, **fields).max_positions == 64
    assert describe("QWenLMHeadModel", use_dynamic_ntk=True, **fields).max_positions == 64


def test_baichuans_positions_turn_only_where_the_config_gives_their_number() -> None:
    turning = describe("BaichuanForCausalLM", vocab_size=125_696)
    biased = describe("BaichuanForCausalLM", max_position_embeddings=None, model_max_length=128)
    assert (turning.rope is None, turning.alibi_scale, turning.normalised_head) == (False, None, True)
    assert (biased.rope, biased.alibi_scale, biased.normalised_head) == (None, 1.0, False)


def test_smollms_layers_without_rotation_are_every_fourth_or_those_of_the_config() -> None:
    by_default = describe("SmolLM3ForCausalLM")
    listed = describe("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 1, 0])
    assert (by_default.unrotated_layers, listed.unrotated_layers) == ({3}, {0, 5})
    assert [by_default.rope_of(layer) is None for layer in range(6)] == [False, False, False, True, False, False]
    windowed = describe("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=8)
    assert windowed.sliding_windows == (None, None, None, 8, None, None)
    assert windowed.tied_embeddings


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("OPTForCausalLM", {"ffn_dim": 96, "do_layer_norm_before": False}, "do_layer_norm_before"),
        ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("QWenLMHeadModel", {"no_bias": False}, "no_bias"),
        ("ChatGLMModel", {"rmsnorm": False}, "rmsnorm"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ("GPTNeoXForCausalLM", {"hidden_act": "mish"}, "mish"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 32}, "num_experts"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(architecture: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ServiceError, match=named):
        describe(architecture, **fields)
