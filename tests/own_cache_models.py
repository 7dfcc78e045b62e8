"""Fields of small configurations of models that run with the cache that transformers keeps for them."""

from typing import Any

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
OWN_CACHE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _LINEAR,
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_chunk_size": 16, "head_dim": 16},
    "granitemoehybrid": {
        **_MAMBA,
        "mamba_chunk_size": 16,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "head_dim": 16,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 32,
        "head_dim": 16,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
}
