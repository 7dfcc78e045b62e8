"""A transformers model with its caches: one cache object for each sequence.

Transformers computes everything, attention included. A cache holds the states of layers with a state (state spaces,
linear attention, convolutions) and the keys and values of the others; it can be extended but not truncated. Called by
`worker`, which imports this module only if the model needs it: importing transformers takes seconds.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from antiphon.services.engine.backends.torch.own_cache.kinds import continues_by_token
from antiphon.services.engine.backends.torch.own_cache.memory import CacheBytes
from antiphon.services.engine.models.config_fields import config_error, integer, token_ids, weight_dtype
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.shared.errors import ServiceError

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_CONTEXT = 32_768
"""Longest context of a model whose config names none, such as one of state spaces only."""
_MEASURED = (64, 128)


@dataclass(slots=True)
class SequenceCache:
    """The cache of one sequence, and the number of its first tokens that it holds."""

    cache: Any
    num_tokens: int = 0


class OwnCacheModel:
    """A loaded model.

    `description` has the sizes that do not depend on layers; its attention heads are placeholders.
    """

    def __init__(self, module: Any, description: DecoderDescription, *, by_token: bool) -> None:
        """`by_token`: see `continues_by_token`."""
        self.module, self.description, self._by_token = module, description, by_token
        names = inspect.signature(module.forward).parameters
        self._argument = "cache_params" if "cache_params" in names else "past_key_values"

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    def new_cache(self) -> SequenceCache:
        """Returns the cache of a sequence without tokens."""
        return SequenceCache(DynamicCache(config=self.module.config))

    def extend(self, cache: SequenceCache, ids: Tensor, keep: Tensor | None) -> Tensor:
        """Computes the next tokens [n] of a sequence, and adds them to its cache.

        Returns logits [m, vocab] float32 of the tokens with the indices `keep` [m]; of the last one if it is None.
        """
        if self._by_token and cache.num_tokens and len(ids) > 1:
            logits = torch.cat([self._run(cache, ids[index : index + 1], 1) for index in range(len(ids))])
            return logits[-1:] if keep is None else logits.index_select(0, keep)
        return self._run(cache, ids, 1 if keep is None else keep)

    def cache_bytes(self, device: torch.device) -> CacheBytes:
        """Measures a cache with two runs of different lengths. Sliding windows beyond both count as unlimited."""
        sizes: list[int] = []
        with torch.inference_mode():
            for length in _MEASURED:
                cache = self.new_cache()
                self._run(cache, torch.ones(length, dtype=torch.int64, device=device), 1)
                sizes.append(sum(_tensor_bytes(vars(layer)) for layer in cache.cache.layers))
        per_token = -(-max(0, sizes[1] - sizes[0]) // (_MEASURED[1] - _MEASURED[0]))
        return CacheBytes(max(0, sizes[0] - _MEASURED[0] * per_token), per_token)

    def _run(self, cache: SequenceCache, ids: Tensor, keep: int | Tensor) -> Tensor:
        given = {self._argument: cache.cache}
        output = self.module(input_ids=ids.unsqueeze(0), use_cache=True, logits_to_keep=keep, **given)
        cache.num_tokens += len(ids)
        return output.logits[0].to(torch.float32)


def load_own_cache_model(
    model_dir: Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> OwnCacheModel:
    """Returns the model, loaded on the device. Raises `ServiceError` with the reason if it cannot run this way."""
    names = ", ".join(map(str, config.get("architectures") or [])) or str(config.get("model_type"))
    try:
        loader: Any = AutoModelForCausalLM
        module, info = loader.from_pretrained(model_dir, dtype=dtype, output_loading_info=True, trust_remote_code=False)
        missing = sorted(info["missing_keys"])
        if missing:
            raise config_error(f"its checkpoint lacks {', '.join(missing[:5])}")
        description = _describe(config, module.config.get_text_config().to_dict())
        return OwnCacheModel(module.to(device).eval(), description, by_token=continues_by_token(config))
    except ServiceError as error:
        reason = error.message.removeprefix("config.json: ")
        raise config_error(f"architecture {names} cannot run through transformers: {reason}") from error
    except Exception as error:  # exceptions of foreign modelling code have no common base class
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise config_error(f"architecture {names} cannot run through transformers: {reason}") from error


def _describe(config: Mapping[str, Any], text: Mapping[str, Any]) -> DecoderDescription:
    """Returns a description for the state table and the memory of a step."""
    hidden = integer(text, "hidden_size", text.get("n_embd") or text.get("d_model"))
    counted = text.get("n_layer") or text.get("n_layers") or len(text.get("layers_block_type") or ()) or None
    layers = integer(text, "num_hidden_layers", counted)
    inner = text.get("intermediate_size")
    wide = max(inner) if isinstance(inner, list) else inner or 4 * hidden
    context = next((text[name] for name in _CONTEXT_FIELDS if text.get(name)), _CONTEXT)
    return DecoderDescription(
        family="transformers",
        vocab_size=integer(text, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden,
        intermediate_size=wide,
        max_positions=context,
        rope=None,
        dtype=weight_dtype(config),
        sliding_windows=(None,) * layers,
        eos_token_ids=token_ids(text, "eos_token_id"),
    )


def _tensor_bytes(value: Any) -> int:
    """Returns the bytes of all tensors in a value, in lists and dicts too."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0
