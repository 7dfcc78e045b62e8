"""Runs models without a family in `models` through transformers, with the engine's paged attention instead of theirs.

Transformers computes everything but attention: each layer passes its queries, keys and values to a registered function,
which writes and reads the paged KV cache. A trial run of one token determines the shape of the cache. Raises
`ServiceError` for an architecture whose attention cannot be replaced. Code from a model directory runs only with
`--trust-remote-code`. Called by the torch worker, which imports this module only for such models, because importing
transformers takes seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from antiphon.services.engine.kernels.paged_attention import Scores, paged_attention, write_kv
from antiphon.services.engine.models.config_fields import config_error, integer, token_ids, weight_dtype
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.models.unknown import check_known, refusal
from antiphon.shared.errors import ServiceError
from antiphon.shared.settings.quantization import prepared_method

_ATTENTION = "antiphon_paged"
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_CHANGING_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the sequence length, so that cached keys would become wrong."""
_FOREIGN = ("position_bias", "head_mask")
"""Arguments of attention that change scores in ways that the paged attention does not support."""


class _Attending(Protocol):
    """Computes the attention of one forward pass."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """Computes attention for queries [1, heads, num_tokens, head_dim], keys and values [1, kv_heads, …].

        `asked` holds the layer's other arguments. Returns [1, num_tokens, heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerFacts:
    """The shape of one layer's attention, recorded in the trial run."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    has_sinks: bool
    """Whether its heads have sinks (`s_aux`)."""


class _Trial:
    """Records the shape of every layer's attention and returns zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, _LayerFacts] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """See `_Attending`."""
        foreign = [name for name in _FOREIGN if asked.get(name) is not None]
        if foreign or asked.get("is_causal") is False or asked["attention_mask"] is not None:
            raise config_error(f"its attention needs {', '.join(foreign) or 'a mask of its own'}.")
        if keys.shape[:3] != values.shape[:3] or values.shape[3] > keys.shape[3] or layer in self.layers:
            raise config_error("its layers do not keep one key, and one value that is not wider.")
        window, has_sinks = asked.get("sliding_window"), asked.get("s_aux") is not None
        self.layers[layer] = _LayerFacts(
            num_heads=queries.shape[1],
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[3],
            window=window,
            has_sinks=has_sinks,
        )
        return queries.new_zeros(*queries.shape[:3], values.shape[3]).transpose(1, 2)


class _Paged:
    """Attention of one step over the paged KV cache."""

    def __init__(self, step: StepInputs, windows: tuple[int | None, ...]) -> None:
        self._step, self._windows = step, windows

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """See `_Attending`."""
        narrower = keys.shape[3] - values.shape[3]
        if narrower:
            # Values are stored in the width of keys, padded with zeros.
            values = F.pad(values, (0, narrower))
        flat = [x[0].transpose(0, 1).contiguous() for x in (queries, keys, values)]
        caches = self._step.key_caches[layer], self._step.value_caches[layer]
        write_kv(flat[1], flat[2], *caches, self._step.slot_mapping[0])
        scores = Scores(asked.get("scaling"), asked.get("softcap"), asked.get("s_aux"))
        batch = self._step.attention[self._windows[layer]]
        attended = paged_attention(flat[0], flat[1], flat[2], *caches, batch, scores).unsqueeze(0)
        return attended[..., : attended.shape[3] - narrower]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """The attention function registered with transformers, which calls it in every layer."""
    attending: _Attending | None = asked.pop("antiphon_attention", None)
    if attending is None:
        raise config_error("its layers do not pass on what the engine tells their attention.")
    return attending.attend(module.layer_idx, query, key, value, {**asked, "attention_mask": attention_mask}), None


class TransformersModel:
    """A `LanguageModel` that runs a model of transformers."""

    def __init__(self, model: Any, description: DecoderDescription, embedding_size: int) -> None:
        self._model, self.description, self._embedding_size = model, description, embedding_size

    @property
    def weights(self) -> object:
        """See `LanguageModel`."""
        return self._model

    @property
    def embedding_size(self) -> int:
        """See `LanguageModel`."""
        return self._embedding_size

    @property
    def weights_bytes(self) -> int:
        """See `LanguageModel`."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def forward(self, ids: Tensor, positions: Tensor, step: StepInputs) -> None:
        """See `LanguageModel`."""
        self.step_logits(ids, positions, step, ids.new_zeros(1))

    def step_logits(self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor | None) -> Tensor:
        """See `LanguageModel`."""
        attending = _Paged(step, self.description.sliding_windows)
        return _run(self._model, ids, positions, attending, 0 if tokens is None else tokens)

    def hidden_and_logits(
        self, ids: Tensor, positions: Tensor, step: StepInputs, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `LanguageModel`."""
        attending = _Paged(step, self.description.sliding_windows)
        hidden, logits = _run_with_hidden(self._model, ids, positions, attending, tokens)
        assert hidden is not None, "embedding_size is not 0, so the trial run gave hidden states"
        return hidden, logits


def load_transformers_model(
    model_dir: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> TransformersModel:
    """Returns the model, loaded on the device. Raises `ServiceError` with the reason if it cannot run this way.

    `trust_remote_code` allows code from the model's directory to run.
    """
    names = ", ".join(map(str, config.get("architectures") or [])) or "none at all"
    if config.get("auto_map") and not trust_remote_code and config.get("model_type") not in CONFIG_MAPPING:
        raise refusal(names, "its code comes with the model, and is run with --trust-remote-code only")
    if config.get("model_type") not in CONFIG_MAPPING:
        check_known(config, trusted=trust_remote_code)
    try:
        model, has_head = _load(model_dir, config, dtype, trust_remote_code)
        model = model.to(device).eval()
        trial = _Trial()
        token = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            hidden, _ = _run_with_hidden(model, token, token, trial, 0)
        description = _describe(config, model.config.get_text_config(), trial.layers)
        description = replace(description, has_head=has_head)
        return TransformersModel(model, description, 0 if hidden is None else hidden.shape[-1])
    except ServiceError as error:
        raise refusal(names, error.message.removeprefix("config.json: ")) from error
    except Exception as error:  # exceptions of foreign modelling code have no common base class
        raise refusal(names, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def _load(model_dir: Path, fields: Mapping[str, Any], dtype: torch.dtype, trusted: bool) -> tuple[Any, bool]:
    """Returns the model, and whether its checkpoint has a language model head."""
    if any(str(name).endswith(_CLASSIFIERS) for name in fields.get("architectures") or []):
        raise config_error("classification heads are not supported.")
    config: Any = AutoConfig.from_pretrained(model_dir, trust_remote_code=trusted)
    model_class = _model_class(config, model_dir, trusted)
    if model_class is None or config.is_encoder_decoder:
        raise config_error("it is no decoder that generates text.")
    if not model_class._supports_attention_backend:
        raise config_error("its attention cannot be replaced.")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        raise config_error(f"it has layers of type {', '.join(sorted(kinds))}.")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if rope in _CHANGING_ROPES:
        raise config_error(f"positions scaled by {rope!r} change with the length.")
    AttentionInterface.register(_ATTENTION, _attention)
    if prepared_method(fields) == "mxfp4":
        # Transformers would need another package and a GPU to read these experts.
        raise config_error("its experts are in MXFP4.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation=_ATTENTION,
        trust_remote_code=trusted,
        output_loading_info=True,
    )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    lacks = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if lacks:
        raise config_error(f"its checkpoint lacks {', '.join(lacks[:5])}.")
    return model, not missing


def _model_class(config: Any, model_dir: Path, trusted: bool) -> Any:
    """Returns the class for a config, from transformers or from the model's directory; None if neither has one."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    return get_class_from_dynamic_module(reference, model_dir) if trusted and reference else None


def _run(model: Any, ids: Tensor, positions: Tensor, attending: _Attending, keep: int | Tensor) -> Tensor:
    """Runs the model on ids and positions [num_tokens]. Returns logits [tokens kept, vocab] float32.

    `keep`: the token indices to keep, or how many of the last tokens; 0 keeps all.
    """
    output = model(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=keep,
        antiphon_attention=attending,
    )
    return output.logits[0].to(torch.float32)


def _run_with_hidden(
    model: Any, ids: Tensor, positions: Tensor, attending: _Attending, keep: int | Tensor
) -> tuple[Tensor | None, Tensor]:
    """Returns the output of the model below its head [num_tokens, hidden], and what `_run` returns.

    The first is None if the model has no such part or if that part has an output of another kind.
    """
    seen: list[Any] = []
    body = model.base_model
    if body is model:
        return None, _run(model, ids, positions, attending, keep)
    hook = body.register_forward_hook(lambda _module, _arguments, output: seen.append(output))
    try:
        logits = _run(model, ids, positions, attending, keep)
    finally:
        hook.remove()
    hidden = getattr(seen[0], "last_hidden_state", None) if seen else None
    if not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, len(ids)):
        return None, logits
    return hidden[0], logits


def _describe(config: Mapping[str, Any], text: Any, layers: Mapping[int, _LayerFacts]) -> DecoderDescription:
    """Returns a description for the KV cache and the steps, from the trial run and the config."""
    fields = text.to_dict()
    if not layers or sorted(layers) != list(range(len(layers))):
        raise config_error("not every layer asked for attention.")
    first = layers[0]
    if any(_without_window(facts) != _without_window(first) for facts in layers.values()):
        raise config_error("its layers have different heads.")
    windowed = [layer for layer, kind in enumerate(fields.get("layer_types") or []) if kind == "sliding_attention"]
    if any(layers[layer].window is None for layer in windowed):
        raise config_error("its layers do not tell their windows.")
    hidden_size = integer(fields, "hidden_size")
    return DecoderDescription(
        family="transformers",
        vocab_size=integer(fields, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=len(layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        intermediate_size=integer(fields, "intermediate_size", 4 * hidden_size),
        max_positions=integer(fields, "max_position_embeddings"),
        rope=None,
        dtype=weight_dtype(config),
        attention_sinks=any(facts.has_sinks for facts in layers.values()),
        sliding_windows=tuple(layers[layer].window for layer in range(len(layers))),
        eos_token_ids=token_ids(fields, "eos_token_id"),
    )


def _without_window(facts: _LayerFacts) -> _LayerFacts:
    """Returns the facts of a layer with full attention. Layers may differ only in their windows and sinks."""
    return replace(facts, window=None, has_sinks=False)
