from typing import Any

import pytest

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.registry import find_family
from antiphon.shared.errors import ServiceError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def describe(architecture: str = "LlamaForCausalLM", **fields: Any) -> DecoderDescription:
    config = {**CONFIG, "architectures": [architecture], **fields}
    return find_family(config).describe(config)


def test_a_missing_field_takes_its_familys_default() -> None:
    description = describe()
    assert (description.num_kv_heads, description.head_dim, description.dtype) == (4, 16, "float32")
    assert (description.norm_eps, description.rope.theta, description.tied_embeddings) == (1e-6, 10_000.0, False)
    assert description.eos_token_ids == ()
    assert describe("Qwen3ForCausalLM").head_dim == 128


def test_old_and_new_spellings_mean_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = describe(torch_dtype="bfloat16", rope_theta=500.0, rope_scaling={"type": "yarn", **scaling})
    new = describe(dtype="bfloat16", rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, **scaling})
    assert old == new
    assert (old.dtype, old.rope.kind, old.rope.theta) == ("bfloat16", "yarn", 500.0)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
        ({"rope_type": "dynamic", "factor": 8.0}, 128),
    ],
)
def test_scaled_positions_give_the_longest_context(scaling: dict[str, Any], length: int) -> None:
    assert describe(rope_scaling=scaling).max_positions == length


def test_windows_are_only_where_the_config_turns_them_on() -> None:
    assert describe("MistralForCausalLM", sliding_window=9).sliding_windows == (9, 9, 9)
    assert describe("MistralForCausalLM", sliding_window=None).sliding_windows == (None, None, None)
    qwen = {"sliding_window": 9, "max_window_layers": 1}
    assert describe("Qwen2ForCausalLM", **qwen).sliding_windows == (None, None, None)
    assert describe("Qwen2ForCausalLM", use_sliding_window=True, **qwen).sliding_windows == (None, 9, 9)
    listed = ["sliding_attention", "full_attention", "sliding_attention"]
    description = describe("Qwen3ForCausalLM", use_sliding_window=True, layer_types=listed, **qwen)
    assert description.sliding_windows == (9, None, 9)


def test_several_end_tokens_are_all_kept() -> None:
    assert describe(eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert describe(eos_token_id=7).eos_token_ids == (7,)


def test_an_unknown_architecture_is_refused_with_the_list_of_those_supported() -> None:
    with pytest.raises(ServiceError) as failure:
        describe("WhateverForCausalLM")
    assert "WhateverForCausalLM is not supported" in failure.value.message
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in failure.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "mish"}, "mish"),
        ({"dtype": "float8"}, "float8"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": [1, -2]}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"architectures": None}, "none at all"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_the_name_of_the_field(fields: dict[str, Any], named: str) -> None:
    config = {**CONFIG, **fields}
    with pytest.raises(ServiceError, match=named):
        find_family(config).describe(config)
