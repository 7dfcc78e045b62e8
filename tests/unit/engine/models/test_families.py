"""What the configs of single families mean, where parity with a small model cannot show it."""

from typing import Any

import pytest

from antiphon.services.engine.models.description import DecoderDescription, QueryGrowth
from antiphon.services.engine.models.recurrent_kinds import ChannelSpace, StateSpace
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


FALCON: dict[str, Any] = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "num_key_value_heads": 2,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 8, "shared_intermediate_size": 32}


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


def test_gemma_3ns_first_layers_cut_gates_and_its_last_ones_borrow_keys() -> None:
    layers = {"num_hidden_layers": 12, "num_kv_shared_layers": 4, "sliding_window": 8}
    older = describe("Gemma3nForCausalLM", rope_theta=5e5, rope_local_base_freq=500.0, **layers)
    assert older.sliding_windows == ((8,) * 4 + (None,)) * 2 + (8, 8)
    assert older.kv_sources == (0, 1, 2, 3, 4, 5, 6, 7, 7, 4, 7, 7)
    assert older.attention_layers == tuple(range(8))
    assert older.gate_cuts == (pytest.approx(1.6448536),) * 10 + (None, None)
    assert older.rope is not None
    assert older.local_rope is not None
    assert (older.rope.theta, older.local_rope.theta) == (5e5, 500.0)
    ropes = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 500.0}}
    assert describe("Gemma3nForCausalLM", rope_parameters=ropes, **layers) == older


def test_longrope_has_other_divisors_beyond_the_original_context() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    description = describe("Phi3ForCausalLM", original_max_position_embeddings=32, rope_scaling=scaling)
    assert (description.usual_positions, description.max_positions) == (32, 128)
    for length, longest, divisors in ((32, 32, (1.0,) * 8), (33, 128, (2.0,) * 8)):
        served = description.for_context(length)
        assert served.rope is not None
        assert (served.rope.kind, served.rope.divisors) == ("longrope", divisors)
        assert (served.usual_positions, served.max_positions) == (longest, longest)


def test_kimi_k25_is_kimi_k2_beside_an_encoder() -> None:
    text = {"model_type": "kimi_k2", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False}
    family = find_family(config)
    description = family.describe(config)
    assert (description.family, description.tied_embeddings) == ("deepseek", False)
    assert "language_model.model.layers.3." in description.other_parts
    names = {source.name for parameter in family.layout(description) for source in parameter.sources}
    assert {"language_model.lm_head.weight", "language_model.model.layers.2.self_attn.kv_b_proj.weight"} <= names


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


def test_llama4s_layers_see_chunks_or_have_no_rotation() -> None:
    fields = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 96}
    description = describe("Llama4ForCausalLM", attention_chunk_size=8, interleave_moe_layer_step=2, **fields)
    assert description.unrotated_layers == {3}
    assert description.sliding_windows == (8, 8, 8, None, 8, 8)
    assert [description.has_qk_norm(layer) for layer in range(6)] == [True, True, True, False, True, True]
    assert description.query_growth == QueryGrowth(0.1, 8192, first=1, unrotated=True)
    assert description.experts is not None
    assert (description.intermediate_size, description.experts.layers) == (96, {1, 3, 5})
    plain = describe("Llama4ForCausalLM", attn_temperature_tuning=False, layer_types=["full_attention"] * 6, **fields)
    assert (plain.query_growth, set(plain.sliding_windows)) == (None, {None})


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


LAGUNA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def test_lagunas_layers_differ_in_heads_windows_and_rotation() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"]
    ropes = {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.5, "attention_factor": 1.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    heads = {"num_attention_heads_per_layer": [4, 6, 6, 6, 4, 6], "gating": "per-head"}
    description = describe(
        "LagunaForCausalLM", head_dim=16, layer_types=kinds, rope_parameters=ropes, sliding_window=8, **heads, **LAGUNA
    )
    assert (description.num_heads, description.of_layer(0).q_size, description.of_layer(1).q_size) == (6, 64, 96)
    assert description.sliding_windows == (None, 8, 8, 8, None, 8)
    turned = [description.rope_of(layer) for layer in (0, 1)]
    assert [(rope.kind, rope.theta, rope.rotary_dim) for rope in turned if rope] == [
        ("yarn", 5e5, 8),
        ("default", 1e4, 16),
    ]
    assert (description.max_positions, description.num_gates, description.gate_kind) == (128, 6, "softplus")
    assert description.experts is not None
    assert description.experts.layers == {1, 2, 3, 4, 5}
    assert describe("LagunaForCausalLM", head_dim=16, gating="per-element", **LAGUNA).num_gates == 64


def test_lfm3s_layers_take_turns_and_rotate_a_part_of_the_frequencies() -> None:
    description = describe("Lfm3ForCausalLM", head_dim=16)
    assert [description.is_recurrent(layer) for layer in range(6)] == [True, True, False, True, False, True]
    assert description.sliding_windows == (None, None, None, None, 256, None)
    rope = description.rope_of(2)
    assert rope is not None
    assert (rope.kind, rope.rotary_dim, rope.num_turned) == ("proportional", 16, 4)


def test_internvls_first_format_has_its_decoder_in_another_field() -> None:
    decoder = {**SIZES, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    config = {"architectures": ["InternVLChatModel"], "llm_config": decoder, "torch_dtype": "bfloat16"}
    family = find_family(config)
    description = family.describe(config)
    assert (description.family, description.num_layers, description.dtype) == ("qwen3", 6, "bfloat16")
    names = {source.name for parameter in family.layout(description) for source in parameter.sources}
    assert {"language_model.lm_head.weight", "language_model.model.layers.5.mlp.up_proj.weight"} <= names
    with pytest.raises(ServiceError, match="'internlm2' is not served here; served: qwen2, qwen3, qwen3_moe"):
        family.describe({**config, "llm_config": {**decoder, "model_type": "internlm2"}})


def test_nemotrons_mlps_belong_to_the_layer_before_them() -> None:
    """With the pattern of Nemotron 3 Nano 30B, and with a state space and an attention that nothing follows."""
    name, fields = "NemotronHForCausalLM", {"num_key_value_heads": 2}
    long = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    whole = describe(name, hybrid_override_pattern=long, **fields)
    assert (whole.num_layers, len(whole.attention_layers), len(whole.without_mlp)) == (29, 6, 6)
    short = describe(name, hybrid_override_pattern="M-M*EM*", **fields)
    assert short.recurrent is not None
    assert short.experts is not None
    assert (short.recurrent.layers, short.without_mlp, short.experts.layers) == ({0, 1, 3}, {1, 3, 4}, {2})
    names = [one for each in find_family({"architectures": [name]}).layout(short) for one in each.sources]
    numbers = {source.name.split(".")[2] for source in names if ".layers." in source.name}
    assert numbers == set("0123456")
    assert {"backbone.layers.1.mixer.up_proj.weight", "backbone.layers.4.norm.weight"} <= {one.name for one in names}


def test_falcons_factors_are_those_of_scores_and_outputs() -> None:
    factors = {"attention_in_multiplier": 0.5, "key_multiplier": 3.0, "attention_out_multiplier": 4.0}
    others = {"ssm_in_multiplier": 2.0, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0], "mlp_multipliers": [0.5, 0.25]}
    description = describe("FalconH1ForCausalLM", **FALCON, **factors, **others)
    assert description.query_scale == 16**-0.5 * 0.25 * 3.0
    assert (description.attended_scale, description.mlp_scales) == (2.0, (0.5, 0.25))
    assert isinstance(description.recurrent, StateSpace)
    assert description.recurrent.scales == (2.0, 4.0, 6.0, 8.0, 10.0)
    assert (description.recurrent.norm, description.recurrent.width) == ("none", 128)
    assert description.attention_layers == tuple(description.recurrent.layers) == tuple(range(6))


def test_models_without_attention_have_one_layer_in_the_cache() -> None:
    falcon = describe("FalconMambaForCausalLM", time_step_rank=5)
    assert (falcon.attention_layers, len(falcon.slabs), falcon.without_mlp) == ((), 1, frozenset(range(6)))
    assert isinstance(falcon.recurrent, ChannelSpace)
    assert (falcon.recurrent.step_rank, falcon.recurrent.part_norms) == (5, "plain")
    assert not describe("GraniteMoeHybridForCausalLM", **MAMBA, layer_types=["mamba"] * 6).attention_layers
    assert not describe("NemotronHForCausalLM", hybrid_override_pattern="MM-", num_key_value_heads=2).attention_layers


def test_jambas_layers_take_turns() -> None:
    fields = {"attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_offset": 0, "num_key_value_heads": 2}
    description = describe("JambaForCausalLM", **fields)
    assert description.attention_layers == (2, 5)
    assert description.experts is not None
    assert description.experts.layers == {0, 2, 4}
    assert isinstance(description.recurrent, ChannelSpace)
    assert (description.recurrent.channels, description.recurrent.step_rank) == (128, 4)


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("LagunaForCausalLM", {**LAGUNA, "gating": "never"}, "gating"),
        ("LagunaForCausalLM", {**LAGUNA, "moe_router_logit_softcapping": 30.0}, "cap on the router"),
        ("LagunaForCausalLM", {**LAGUNA, "num_attention_heads_per_layer": [4]}, "must list 6 numbers"),
        ("LagunaForCausalLM", {**LAGUNA, "num_attention_heads_per_layer": [3] * 6}, "multiples"),
        ("LagunaForCausalLM", {**LAGUNA, "rope_parameters": {"rope_type": "yarn"}}, "each kind of layer"),
        ("LagunaForCausalLM", {**LAGUNA, "mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("AfmoeForCausalLM", {**LAGUNA, "n_group": 2}, "n_group"),
        ("HYV3ForCausalLM", {**LAGUNA, "mlp_bias": True}, "mlp_bias"),
        ("Lfm3ForCausalLM", {"layer_types": ["conv"] * 6}, "layer_types"),
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
        ("Gemma3nForCausalLM", {"altup_active_idx": 1}, "altup_active_idx"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 6}, "must leave layers"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 3}, "no earlier layer of the same type"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "intermediate_size": [96]}, "for each of 6 layers"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "activation_sparsity_pattern": 1.0}, "from 0 to below 1"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ("GPTNeoXForCausalLM", {"hidden_act": "mish"}, "mish"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 32}, "num_experts"),
        ("GraniteMoeHybridForCausalLM", {**MAMBA, "layer_types": ["mamba", "attention"]}, "each of 6 layers"),
        ("BambaForCausalLM", MAMBA, "attn_layer_indices"),
        ("BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1], "mamba_n_groups": 3}, "8 heads .* 3 groups"),
        ("BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1], "mamba_d_head": 8}, "mamba_d_head"),
        ("BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1], "time_step_limit": [0.0]}, "time_step_limit"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "-M*"}, "layer 0 of the kind 'mlp'"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-E"}, "layer 3 of the kind 'moe'"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M?*"}, "layers_block_type"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*", "mlp_bias": True}, "mlp_bias"),
        ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("Llama4ForCausalLM", {"floor_scale": 0.5}, "floor_scale"),
        ("FalconH1ForCausalLM", {**FALCON, "mlp_multipliers": [1.0]}, "mlp_multipliers"),
        ("FalconH1ForCausalLM", {**FALCON, "attention_bias": True, "key_multiplier": 0.5}, "attention_bias"),
        ("FalconH1ForCausalLM", {**FALCON, "projectors_bias": True}, "projectors_bias"),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, "another activation"),
        ("JambaForCausalLM", {"attn_layer_period": 8, "attn_layer_offset": 7}, "leave no layer with attention"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(architecture: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ServiceError, match=named):
        describe(architecture, **fields)
