"""Fields of small configurations of decoders without a family here, which run through transformers."""

from typing import Any

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HEADS: dict[str, Any] = {"head_dim": 16}
_WINDOWS: dict[str, Any] = {
    **_HEADS,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
FOREIGN_FAMILIES: dict[str, dict[str, Any]] = {
    "bitnet": {},
    "cwm": _WINDOWS,
    "exaone_moe": {**_WINDOWS, **_EXPERTS, "n_group": 1, "topk_group": 1},
    "helium": _HEADS,
    "jais2": _HEADS,
    "nanochat": _HEADS,
    "olmo": {},
    "phi": {},
    "phimoe": {"num_local_experts": 4},
    "solar_open": {
        **_HEADS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
    },
    "vaultgemma": {**_WINDOWS, "query_pre_attn_scalar": 16},
}
