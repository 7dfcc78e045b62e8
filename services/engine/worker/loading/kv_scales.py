"""Folds the scales that a checkpoint has for keys and values in a KV cache of 8 bits into the weights.

Floating-point numbers of 8 bits have the same relative precision everywhere, so a scale matters for the range alone. It
is rounded up to a power of two, by which weights are multiplied without an error, and attention stays as it is:

    keys     rows of the key projection / s, rows of the query projection of each layer that reads these keys * s
    values   rows of the value projection / s, columns of the output projection of each layer that reads them * s

If queries and keys are normalised behind their projections, the weights of their norms are multiplied instead. Called
by the parameter reader, and by the workers before they load a model.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import KV_SCALE_ENDINGS, Parameter
from antiphon.services.engine.models.registry import has_family
from antiphon.services.engine.parallel.shard import Shard, local_heads, local_kv_heads
from antiphon.services.engine.quantization.choice import WeightForm
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.extras import serves_adapters
from antiphon.services.engine.worker.loading.checkpoint import Checkpoint
from antiphon.services.engine.worker.loading.weight_files import weight_files
from antiphon.shared.config import EngineSettings

logger = logging.getLogger(__name__)

Matrix = Tensor | QuantizedWeight
_IN_FORM = ", KV scales"
"""Appended to a form's name: KV and packed weights with folded scales are not those without."""
_MODULES = ("", "attn.", "{}_proj.", "qkv_proj.")
"""Where scales are, relative to a layer's attention; `{}` stands for k or v."""
_BOTH = "kv_scale"
"""The deprecated name of one scale for keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFactors:
    """The factors of a layer's heads, float32 powers of two. A layer that reads another one's keys has queries only."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    attended: Tensor
    head_dim: int
    normed: bool
    """Whether the factors of queries and keys belong to the weights of their norms."""

    def rows(self) -> Tensor:
        """Returns the factor of each row of `qkv`."""
        queries_keys = torch.cat([self.queries, self.keys])
        queries_keys = torch.ones_like(queries_keys) if self.normed else queries_keys
        return torch.cat([queries_keys, self.values]).repeat_interleave(self.head_dim)

    def columns(self) -> Tensor:
        """Returns the factor of each column of `o`."""
        return self.attended.repeat_interleave(self.head_dim)


class KvFactors:
    """The factors of a model's layers, by the layers' numbers in the whole model. Layers without scales are missing."""

    def __init__(self, layers: Mapping[int, LayerFactors] | None = None) -> None:
        self._layers = layers or {}

    def has(self, name: str) -> bool:
        """Whether a parameter with this name in the whole model has factors."""
        return self._of(name) is not None

    def folded(self, name: str, weight: Tensor, first: int = 0) -> Tensor:
        """Returns a plain parameter, or its rows from `first` on, with its factors."""
        found = self._of(name)
        if found is None:
            return weight
        factors = found.to(weight.device)
        if not _is_output(name):
            factors = factors[first : first + len(weight)]
            factors = factors[:, None] if weight.dim() > 1 else factors
        # The product is in float32, whose range has all factors, unlike that of float16.
        return (weight * factors).to(weight.dtype)

    def folded_matrix(self, name: str, weight: Matrix, first: int = 0) -> Matrix:
        """Like `folded`, for a matrix that may be quantized: its scales are multiplied."""
        if isinstance(weight, Tensor):
            return self.folded(name, weight, first)
        factors = self._of(name)
        if factors is None:
            return weight
        # All columns have the same factor, see `_Reading.values`.
        factors = factors[:1] if _is_output(name) else factors[first : first + weight.shape[0]]
        factors = factors.to(weight.scales.device)
        return replace(weight, scales=weight.scales * (factors[:, None] if weight.scales.dim() > 1 else factors))

    def folded_norms(self, layer: int, norms: Tensor, d: DecoderDescription, shard: Shard) -> Tensor:
        """Returns the norms' weights [query heads and key heads, head_dim] of a rank with their factors.

        `d` describes the layer in the whole model.
        """
        factors = self._layers.get(layer)
        if factors is None or not factors.normed:
            return norms
        keys = local_kv_heads(d, shard)
        own = torch.cat([factors.queries[local_heads(d, shard)], factors.keys[keys.start : keys.stop]])
        return (norms * own[:, None].to(norms.device)).to(norms.dtype)

    def _of(self, name: str) -> Tensor | None:
        """Returns the factors of a parameter's rows, or of its columns if it is an output projection."""
        _, _, rest = name.partition("layers.")
        layer, _, within = rest.partition(".")
        factors = self._layers.get(int(layer)) if layer.isdecimal() else None
        if factors is None or within not in ("qkv.weight", "qkv.bias", "o.weight"):
            return None
        found = factors.columns() if _is_output(name) else factors.rows()
        return None if bool((found == 1).all()) else found


def with_kv_scales(
    form: WeightForm, settings: EngineSettings, model_dir: Path, config: Mapping[str, Any]
) -> WeightForm:
    """Returns the form in which weights have the checkpoint's scales, if there are any and the KV cache has 8 bits."""
    if settings.cache.kv_cache_dtype == "auto" or form.is_drawn or not _has_scales(model_dir, form):
        return form
    because = ""
    if not has_family(config):
        because = "this architecture runs through transformers"
    elif serves_adapters(settings):
        because = "an adapter's products would need them too"
    if because:
        logger.warning("--kv-cache-dtype: no scales of the checkpoint have an effect: %s", because)
        return form
    return replace(form, name=f"{form.name}{_IN_FORM}", kv_scales=True)


def _has_scales(model_dir: Path, form: WeightForm) -> bool:
    if not form.is_smoothquant and weight_files(model_dir)[0].suffix == ".gguf":
        return False
    with Checkpoint(model_dir, smoothquant=form.is_smoothquant) as checkpoint:
        return bool(checkpoint.others(ends=KV_SCALE_ENDINGS))


def read_factors(
    checkpoint: Checkpoint, parameters: Mapping[str, Parameter], description: DecoderDescription, form: WeightForm
) -> KvFactors:
    """Returns the factors of a model, and logs a warning about scales that have no effect."""
    stored = checkpoint.others(ends=KV_SCALE_ENDINGS)
    reading = _Reading(checkpoint=checkpoint, stored=stored, parameters=parameters, description=description, form=form)
    for layer in description.attention_layers:
        reading.add(layer)
    reading.warn()
    return KvFactors(reading.layers)


@dataclass(slots=True, kw_only=True)
class _Reading:
    """The scales of a checkpoint that is being read."""

    checkpoint: Checkpoint
    stored: Mapping[str, Tensor]
    parameters: Mapping[str, Parameter]
    description: DecoderDescription
    form: WeightForm
    layers: dict[int, LayerFactors] = field(default_factory=dict[int, LayerFactors])
    seen: set[str] = field(default_factory=set[str])
    """Names of the scales that belong to a layer."""
    unused: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    """What has no effect, and why → the layers."""

    def add(self, layer: int) -> None:
        """Adds the factors of a layer that has keys and values, and of those that read them."""
        sources = self.description.kv_sources
        readers = [reader for reader, source in enumerate(sources) if source == layer] or [layer]
        keys, values = self.scales("k", layer), self.values(layer, readers)
        if bool((torch.cat([keys, values]) == 1).all()):
            return
        for reader in readers:
            d = self.description.of_layer(reader)
            group, own = d.num_heads // d.num_kv_heads, slice(None if reader == layer else 0)
            self.layers[reader] = LayerFactors(
                queries=keys.repeat_interleave(group),
                keys=1 / keys[own],
                values=1 / values[own],
                attended=values.repeat_interleave(group),
                head_dim=d.head_dim,
                normed=d.has_qk_norm(reader),
            )

    def values(self, layer: int, readers: Iterable[int]) -> Tensor:
        """Returns the scales of a layer's values.

        A quantized output projection can be multiplied by one factor for all its columns, which is the largest.
        """
        scales = self.scales("v", layer)
        outputs = [self.parameters[f"layers.{reader}.o.weight"] for reader in readers]
        if self.form.quantize is not None or any(map(self.checkpoint.is_quantized, outputs)):
            return scales.max().expand_as(scales)
        return scales

    def scales(self, which: str, layer: int) -> Tensor:
        """Returns the scale of each key head's keys (k) or values (v), rounded up to powers of two; 1 without one."""
        d = self.description.of_layer(layer)
        found, count = self.find(which, layer), d.num_kv_heads
        if found is None:
            return torch.ones(count)
        what = "keys" if which == "k" else "values"
        if d.latent is not None:
            self.unused[what, "latent attention"].append(layer)
        elif which == "v" and d.value_norm:
            self.unused[what, "they are normalised"].append(layer)
        elif found.numel() not in (1, count):
            self.unused[what, f"{found.numel()} scales for {count} heads"].append(layer)
        else:
            return torch.tensor([_rounded_up(scale) for scale in found.flatten().tolist()]).expand(count)
        return torch.ones(count)

    def find(self, which: str, layer: int) -> Tensor | None:
        """Returns the tensor of a layer's scales; None if there is none."""
        output = self.parameters[f"layers.{layer}.o.weight"].sources[0].name
        attention = output.removesuffix(".weight").rpartition(".")[0]
        modules = [module.format(which) for module in _MODULES]
        names = [f"{attention}.{name}" for name in (*(f"{module}{which}_scale" for module in modules), _BOTH)]
        # A decoder without its head may lack the first part of all names.
        names += [name.partition(".")[2] for name in names]
        found = [name for name in names if name in self.stored]
        self.seen.update(found)
        return self.stored[found[0]] if found else None

    def warn(self) -> None:
        """Logs which scales have no effect."""
        for layer in range(self.description.num_layers):
            if self.description.borrows_kv(layer) and [self.find("k", layer), self.find("v", layer)] != [None, None]:
                self.unused["keys and values", "those of another layer are read"].append(layer)
        parts = [
            f"{what} of layers {', '.join(map(str, layers))} ({why})" for (what, why), layers in self.unused.items()
        ]
        known = (*self.seen, *self.description.other_parts)
        others = [name for name in self.stored if not name.startswith(known)]
        if others:
            parts.append(f"{others[0]}{f' and {len(others) - 1} more' * (len(others) > 1)} (no layer has this name)")
        if parts:
            logger.warning("--kv-cache-dtype: scales of the checkpoint without an effect: %s", "; ".join(parts))


def _rounded_up(scale: float) -> float:
    """Returns the smallest power of two that is not below a scale; 1 for numbers that are no scales."""
    if not (0 < scale < math.inf):
        return 1.0
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def _is_output(name: str) -> bool:
    return name.endswith(".o.weight")
