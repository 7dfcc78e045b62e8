"""What the configs of single families mean, where parity with a small model cannot show it."""

from typing import Any

import pytest

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.registry import find_family
from antiphon.shared.errors import ServiceError

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


ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_glms_first_layers_have_no_experts_and_its_drafting_layers_are_left_out() -> None:
    fields = {**ROUTED, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5}
    description = describe("Glm4MoeForCausalLM", **fields)
    assert description.experts is not None
    assert description.experts.layers == {2, 3, 4, 5}
    assert (description.experts.shared_intermediate_size, description.experts.shared_gate) == (32, False)
    assert (description.experts.scale, description.experts.normalise) == (2.5, True)
    assert description.other_parts == ("model.layers.6.",)
    assert description.rope is not None
    assert description.rope.rotary_dim == 8
    dots = describe("Dots1ForCausalLM", **ROUTED).experts
    assert dots is not None
    assert (dots.layers, dots.normalise) == (frozenset(range(6)), False)


def test_gpt_oss_has_windows_in_every_other_layer() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    assert describe("GptOssForCausalLM", **sizes).sliding_windows == (128, None) * 3


def test_an_alpha_stretches_hunyuans_base_of_positions() -> None:
    scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    rope = describe("HunYuanDenseV1ForCausalLM", head_dim=16, rope_scaling=scaling).rope
    assert rope is not None
    assert rope.theta == 10_000.0 * 50.0 ** (16 / 14)
    lists = {"num_experts": 8, "moe_topk": [2] * 6, "moe_intermediate_size": [16] * 6, "num_shared_expert": [1] * 6}
    experts = describe("HunYuanMoEV1ForCausalLM", head_dim=16, **lists).experts
    assert experts is not None
    assert (experts.num_per_token, experts.intermediate_size, experts.shared_intermediate_size) == (2, 16, 16)


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("Glm4MoeForCausalLM", {**ROUTED, "n_group": 3}, "n_group"),
        ("Glm4MoeForCausalLM", {**ROUTED, "n_group": 8, "topk_group": 1}, "num_experts_per_tok"),
        ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 5.0}, "swiglu_limit"),
        ("Ernie4_5_MoeForCausalLM", {"moe_intermediate_size": 16, "use_bias": True}, "use_bias"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ("HunYuanMoEV1ForCausalLM", {"num_experts": 8, "moe_topk": [1, 2]}, "moe_topk"),
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
