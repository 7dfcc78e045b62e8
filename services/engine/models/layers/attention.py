"""The reference attention of a decoder's layers, from the query-key-value product to the attended values.

It runs qk-norm, rotation, the write to the KV cache and attention over the cache as separate plain operations. The
projections before and after are not part of it. Created once per model by its operations (`operations`), called by the
decoder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from antiphon.services.engine.kernels.paged_attention import Scores, paged_attention, write_kv
from antiphon.services.engine.kernels.query_growth import query_growth
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.kernels.rotary import Rotation, make_rotation, rotate
from antiphon.services.engine.models.description import DecoderDescription, QueryGrowth, RopeParameters
from antiphon.services.engine.models.kv_groups import layer_groups
from antiphon.services.engine.models.layers.given import GivenEmbeddings
from antiphon.services.engine.models.layers.rope import axes_of, inverse_frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of a step besides its tokens.

    `slot_mapping` [groups, num_tokens]: the cache slot of each token's key and value in the layers of each group
    (`DecoderDescription.kv_groups`). `attention`: the keys visible to each token, in the form of the attention
    implementation (the reference: an `AttentionBatch` for each distinct sliding window of the model's layers; Triton's
    kernels: a `DeviceWork` for each layer). `key_caches`, `value_caches`: one per layer that attends, see
    `paged_attention`. With latent attention the key caches have the latents, and there are no value caches
    (`LatentAttention`).
    """

    slot_mapping: Tensor
    attention: Mapping[Any, Any]
    key_caches: tuple[Tensor, ...]
    value_caches: tuple[Tensor, ...]
    states: Any = None
    """The slots of recurrent states that each sequence reads and writes, in the form of the implementation of the
    layers that have them (the reference: `recurrent.StateStep`)."""
    state_caches: tuple[Tensor, ...] = ()
    """One for each layer with a recurrent state, [slots, …] float32."""
    layer_inputs: Tensor | None = None
    """[num_tokens, layers, size], see `description.LayerInputs`; set by the decoder."""
    given: GivenEmbeddings | None = None
    """The embeddings of the step's virtual tokens; None if there are none."""


class Attention(Protocol):
    """The interface of attention."""

    def prepare(self, positions: Tensor) -> Any:
        """Returns the values that all layers of a step share, to be passed to `attend`.

        `positions` [num_tokens], or with images [3, num_tokens]: in time, row and column (`RopeParameters.sections`).
        """
        ...

    def attend(self, layer: int, qkv: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        """Returns attended values [num_tokens, heads * head_dim] for qkv [num_tokens, (heads + 2 kv_heads) * head_dim].

        Writes the step's keys and values to the cache; may overwrite `qkv`.
        """
        ...


def places_of(layers: Iterable[int]) -> Mapping[int, int]:
    """Returns for each of some layers the index of its cache: those of other layers are left out."""
    return {layer: place for place, layer in enumerate(layers)}


def cache_places(description: DecoderDescription) -> Mapping[int, int]:
    """Returns for each layer that attends, which of the caches of `attention_layers` it reads."""
    places = places_of(description.attention_layers)
    borrowed = {layer: places[source] for layer, source in enumerate(description.kv_sources) if source in places}
    return {**places, **borrowed}


class Rotations:
    """The rotary embeddings of a model's layers, with the type and on the device of `like`."""

    def __init__(self, description: DecoderDescription, like: Tensor) -> None:
        self._dtype = like.dtype
        self.ropes = tuple(description.rope_of(layer) for layer in range(description.num_layers))
        """The rotary embedding of each layer; None: it has none."""
        self._frequencies = {
            rope: inverse_frequencies(rope).to(like.device) for rope in set(self.ropes) if rope is not None
        }
        self._axes = {rope: axes_of(rope).to(like.device) for rope in self._frequencies}

    def of(self, positions: Tensor) -> Mapping[RopeParameters, Rotation]:
        """Returns the rotations for a step. `positions`: see `Attention.prepare`."""
        spatial = positions.dim() > 1
        return {
            rope: make_rotation(
                positions.t().index_select(1, self._axes[rope]) if spatial else positions,
                frequencies,
                rope.attention_factor,
                self._dtype,
                rope.interleaved,
            )
            for rope, frequencies in self._frequencies.items()
        }


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the layers of a step share."""

    rotations: Mapping[RopeParameters, Rotation]
    growth: Tensor | None
    """Factors on queries, [num_tokens, 1, 1] float32; None: there are none."""


def growth_of(positions: Tensor, growth: QueryGrowth | None) -> Tensor | None:
    """Returns the factors on queries, see `Prepared.growth`, of positions [num_tokens]."""
    return None if growth is None else query_growth(positions + growth.first, growth.rate, growth.length)[:, None, None]


def grows(growth: QueryGrowth | None, rope: RopeParameters | None) -> bool:
    """Whether the queries of a layer with this rotary embedding, or none, grow."""
    return growth is not None and (rope is None or not growth.unrotated)


class ReferenceAttention:
    """Attention in plain torch operations.

    For each layer, `qk_norms` [heads + kv_heads, head_dim] or None, and `sinks` [heads] or None.
    """

    def __init__(
        self,
        description: DecoderDescription,
        qk_norms: tuple[Tensor | None, ...],
        like: Tensor,
        sinks: tuple[Tensor | None, ...],
    ) -> None:
        self._description, self._qk_norms = description, qk_norms
        self._of_layer = tuple(map(description.of_layer, range(description.num_layers)))
        self._places = cache_places(description)
        self._groups = layer_groups(description)
        self._rotations = Rotations(description, like)
        self._scores = tuple(Scores(description.query_scale, description.attention_softcap, each) for each in sinks)

    def prepare(self, positions: Tensor) -> Prepared:
        """See `Attention`."""
        return Prepared(self._rotations.of(positions), growth_of(positions, self._description.query_growth))

    def attend(self, layer: int, qkv: Tensor, prepared: Prepared, step: StepInputs) -> Tensor:
        """See `Attention`."""
        d, norm, rope = self._of_layer[layer], self._qk_norms[layer], self._rotations.ropes[layer]
        own_heads = 0 if d.queries_only else d.num_kv_heads
        heads = qkv.view(-1, d.num_heads + 2 * own_heads, d.head_dim)
        queries_keys, values = heads.split((d.num_heads + own_heads, own_heads), dim=1)
        if norm is not None and d.whole_qk_norm:
            parts = queries_keys.split((d.num_heads, d.num_kv_heads), dim=1)
            normed = [rms_norm(part.flatten(1), None, d.norm_eps).view_as(part) for part in parts]
            queries_keys = torch.cat(normed, dim=1) * norm
        elif norm is not None and not d.qk_norm_rotated:
            queries_keys = rms_norm(queries_keys, None, d.norm_eps) * norm
        if rope is not None:
            queries_keys = rotate(queries_keys, prepared.rotations[rope])
        if norm is not None and d.qk_norm_rotated:
            queries_keys = rms_norm(queries_keys, None, d.norm_eps) * norm
        queries, keys = queries_keys.split((d.num_heads, own_heads), dim=1)
        if d.value_norm and own_heads:
            values = rms_norm(values, None, d.norm_eps)
        if prepared.growth is not None and grows(d.query_growth, rope):
            queries = queries * prepared.growth.to(queries.dtype)
        place, group = self._places[layer], self._groups[layer]
        caches, slots = (step.key_caches[place], step.value_caches[place]), step.slot_mapping[group]
        if own_heads:
            write_kv(keys, values, *caches, slots)
        else:
            # The step's own ones, which a prompt without a computed prefix attends to, were written by their layer.
            keys, values = (cache.flatten(0, 1)[slots].to(queries.dtype) for cache in caches)
        batch = step.attention[d.sliding_windows[layer]]
        return paged_attention(queries, keys, values, *caches, batch, self._scores[layer], group).view(-1, d.q_size)
