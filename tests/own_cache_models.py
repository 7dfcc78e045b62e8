"""Fields of small configurations of models that run with the cache that transformers keeps for them."""

from typing import Any

_GPT_J: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8}
OWN_CACHE_FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "codegen": _GPT_J,
    "gptj": _GPT_J,
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "stablelm": {},
    "mimo_v2_flash": {},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "head_dim": 16,
    },
    "zaya": {},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}
