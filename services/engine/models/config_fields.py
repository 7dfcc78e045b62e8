"""Reads the config.json fields that decoder families have in common, in the old and the new spelling.

There is no schema: families read the fields that they need. A field that is missing, of the wrong type or of an unknown
kind raises a `ServiceError` that names it. Called by the families' modules.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from antiphon.services.engine.models.description import (
    ActivationKind,
    DecoderDescription,
    DtypeName,
    RopeKind,
    RopeParameters,
)
from antiphon.shared.errors import ServiceError

Config = Mapping[str, Any]

_DEFAULT_THETA = 10_000.0
_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_KINDS_WITHOUT_EFFECT = ("default", "dynamic")
"""`dynamic` scales only beyond the model's own context, and sequences here are limited to that context."""


def config_error(message: str) -> ServiceError:
    """Returns the error for a model directory that cannot be used."""
    return ServiceError("invalid_value", f"config.json: {message}", param="model")


def integer(config: Config, name: str, default: int | None = None) -> int:
    """Returns a positive integer field. Without a default, the field must be present."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise config_error(f"'{name}' is missing.")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise config_error(f"'{name}' must be a positive integer, not {value!r}.")
    return value


def integer_or_zero(config: Config, name: str, default: int) -> int:
    """Returns an integer field that may be 0."""
    return 0 if config.get(name, default) == 0 else integer(config, name, default)


def number(config: Config, name: str, default: float) -> float:
    """Returns a finite number, or the default if the field is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise config_error(f"'{name}' must be a number, not {value!r}.")
    return float(value)


def boolean(config: Config, name: str, default: bool) -> bool:
    """Returns a boolean field, or the default if it is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise config_error(f"'{name}' must be true or false, not {value!r}.")
    return value


def token_ids(config: Config, name: str) -> tuple[int, ...]:
    """Returns the token ids of a field that contains one id, a list of ids, or nothing."""
    value = config.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise config_error(f"'{name}' must be a token id or a list of them, not {value!r}.")
    return tuple(values)


def weight_dtype(config: Config) -> DtypeName:
    """Returns the type of the checkpoint's weights; `float32` if the config does not specify one."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in get_args(DtypeName):
        raise config_error(f"weights of type {name!r} are not supported; supported: {', '.join(get_args(DtypeName))}.")
    return name


def layer_windows(config: Config, window: int | None) -> tuple[int | None, ...]:
    """Returns each layer's sliding window.

    `layer_types` lists the layers with the window; without that list, the layers from `max_window_layers` on have it.
    """
    num_layers = integer(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        first = integer(config, "max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config_error(f"'layer_types' must list {num_layers} layers.")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise config_error(f"layers of type {', '.join(sorted(map(str, unknown)))} are not supported.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def kv_sources(windows: tuple[int | None, ...], num_shared: int) -> tuple[tuple[int, ...], int]:
    """Returns `DecoderDescription.kv_sources` and the first layer that borrows.

    The last `num_shared` layers (`num_kv_shared_layers`) read the last earlier layer of their kind.
    """
    first = len(windows) - num_shared
    if not num_shared:
        return (), first
    if first < 1:
        raise config_error("'num_kv_shared_layers' must leave layers with keys and values of their own.")
    own = {windows[layer]: layer for layer in range(first)}
    if not set(windows) <= own.keys():
        raise config_error("'num_kv_shared_layers': there is no earlier layer of the same type for some of them.")
    return tuple(layer if layer < first else own[window] for layer, window in enumerate(windows)), first


def unrotated_layers(config: Config) -> frozenset[int]:
    """Returns the layers with a 0 in `no_rope_layers`; without that list, every n-th layer.

    n is `no_rope_layer_interval`, or 4.
    """
    num_layers, interval = integer(config, "num_hidden_layers"), integer(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")
    if not rotated:
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise config_error(f"'no_rope_layers' must list {num_layers} layers.")
    return frozenset(layer for layer in range(num_layers) if not rotated[layer])


def expert_layers(config: Config, first: int) -> frozenset[int]:
    """Returns the layers that `mlp_layer_types` calls `sparse`; without that list, those from `first` on."""
    num_layers, kinds = integer(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(first, num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise config_error(f"'mlp_layer_types' must say 'dense' or 'sparse' for each of {num_layers} layers.")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def activation(config: Config, name: str = "hidden_act", default: str = "silu") -> ActivationKind:
    """Returns the activation function that a field names."""
    asked = config.get(name) or default
    if asked not in _ACTIVATIONS:
        raise config_error(f"activation {asked!r} is not supported; supported: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[asked]


def optional_number(config: Config, name: str) -> float | None:
    """Returns a finite number, or None if the field is missing or null."""
    return None if config.get(name) is None else number(config, name, 0.0)


def sliding_window(config: Config) -> tuple[int | None, ...]:
    """Returns the same window for every layer; None (full attention) if `sliding_window` is missing or null."""
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    return (window,) * integer(config, "num_hidden_layers")


def refuse_unless(config: Config, name: str, expected: bool) -> None:
    """Raises `ServiceError` if a boolean field is present and differs from the only supported value."""
    if boolean(config, name, expected) != expected:
        raise config_error(f"'{name}': {str(not expected).lower()} is not supported.")


def llama_like(config: Config, family: str, *, interleaved: bool = False, **details: Any) -> DecoderDescription:
    """Returns the description of a decoder with Llama's field names; `details` replace fields of the description.

    `interleaved`: heads are rotated in pairs of neighbours.
    """
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config_error(f"'num_key_value_heads' ({num_kv_heads}) must divide 'num_attention_heads' ({num_heads}).")
    num_layers = integer(config, "num_hidden_layers")
    rope, max_positions = rope_parameters(config, integer(config, "head_dim", hidden_size // num_heads))
    common: dict[str, Any] = {
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": integer(config, "head_dim", hidden_size // num_heads),
        "intermediate_size": integer(config, "intermediate_size"),
        "max_positions": max_positions,
        "rope": replace(rope, interleaved=interleaved),
        "dtype": weight_dtype(config),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "activation": details.get("activation") or activation(config),
        "sliding_windows": (None,) * num_layers,
        "tied_embeddings": boolean(config, "tie_word_embeddings", False),
        "eos_token_ids": token_ids(config, "eos_token_id"),
    }
    return DecoderDescription(family=family, **{**common, **details})


def rope_parameters(config: Config, head_dim: int) -> tuple[RopeParameters, int]:
    """Returns the rotary embedding, and the longest context that the model supports with it.

    Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older checkpoints.
    """
    fields = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = fields.get("rope_type") or fields.get("type") or "default"
    share = number(fields, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share)
    theta = number(fields, "rope_theta", _DEFAULT_THETA)
    max_positions = integer(config, "max_position_embeddings", 2048)
    if kind in _KINDS_WITHOUT_EFFECT:
        return RopeParameters(rotary_dim=rotary_dim, theta=theta), max_positions
    if kind == "proportional":
        turned, factor = int(share * head_dim // 2), number(fields, "factor", 1.0)
        rope = RopeParameters(rotary_dim=head_dim, theta=theta, kind=kind, factor=factor, num_turned=turned)
        return rope, max_positions
    if kind == "longrope":
        return _longrope(config, fields, rotary_dim, theta)
    if kind not in get_args(RopeKind):
        raise config_error(
            f"positions scaled by {kind!r} are not supported; supported: {', '.join(get_args(RopeKind))}."
        )
    original = integer(fields, "original_max_position_embeddings", max_positions)
    factor = number(fields, "factor", max_positions / original)
    rope = RopeParameters(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=number(fields, "low_freq_factor", 1.0),
        high_freq_factor=number(fields, "high_freq_factor", 4.0),
        beta_fast=number(fields, "beta_fast", 32.0) or 32.0,
        beta_slow=number(fields, "beta_slow", 1.0) or 1.0,
        truncate=boolean(fields, "truncate", True),
        attention_factor=_attention_factor(fields, factor) if kind == "yarn" else 1.0,
    )
    return rope, _scaled_positions(rope, max_positions)


def ropes_by_kind(config: Config, head_dim: int, usual: Mapping[str, Config]) -> dict[str, Any]:
    """Returns fields of a description: the rotary embedding of layers that see all tokens, and of those with a window.

    `rope_parameters` has an object for `full_attention` and one for `sliding_attention`; `usual`: those that it lacks.
    """
    found, context = config.get("rope_parameters") or {}, config.get("max_position_embeddings")
    if found and not usual.keys() & found.keys():
        raise config_error(f"'rope_parameters' must have an object for each kind of layer: {', '.join(usual)}.")
    given = {**usual, **found}
    (rope, longest), (local_rope, _) = (
        rope_parameters({"rope_parameters": given.get(kind), "max_position_embeddings": context}, head_dim)
        for kind in ("full_attention", "sliding_attention")
    )
    return {"rope": rope, "local_rope": local_rope, "max_positions": longest}


def _longrope(config: Config, fields: Config, rotary_dim: int, theta: float) -> tuple[RopeParameters, int]:
    """Returns longrope with the divisors of the original context, and the longest context with those of long ones.

    Which divisors are used, `short_factor` or `long_factor`, is decided by `DecoderDescription.for_context`.
    """
    divisors = _divisors(fields, "short_factor", rotary_dim // 2)
    original = integer(fields, "original_max_position_embeddings")
    longest = max(integer(config, "max_position_embeddings", original), original)
    stretch = number(fields, "factor", integer(config, "max_position_embeddings", original) / original)
    usual = 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(original))
    rope = RopeParameters(
        rotary_dim=rotary_dim,
        theta=theta,
        kind="longrope",
        original_max_positions=original,
        divisors=divisors,
        long_divisors=_divisors(fields, "long_factor", rotary_dim // 2) if longest > original else (),
        attention_factor=number(fields, "attention_factor", usual),
    )
    return rope, longest


def _divisors(fields: Config, name: str, count: int) -> tuple[float, ...]:
    divisors = fields.get(name)
    if not isinstance(divisors, list) or len(divisors) != count:
        raise config_error(f"positions scaled by longrope need a '{name}' of {count} numbers.")
    return tuple(map(float, divisors))


def _scaled_positions(rope: RopeParameters, max_positions: int) -> int:
    """Returns the longest context after scaling.

    Llama 3 configs contain the length after scaling, `linear` configs the length before; `yarn` configs have either.
    """
    if rope.kind == "linear":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def _attention_factor(fields: Config, factor: float) -> float:
    """Returns yarn's correction of the scores for scaled positions (arXiv 2309.00071, section 3.4)."""
    if fields.get("attention_factor") is not None:
        return number(fields, "attention_factor", 1.0)
    mscale, mscale_all = number(fields, "mscale", 0.0), number(fields, "mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
