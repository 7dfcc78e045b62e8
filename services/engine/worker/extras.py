"""What an engine serves besides plain text: checks whether its model and device can, and the library of adapters.

Called by the workers of all backends at start-up.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from antiphon.services.engine.adapters.delta import AdapterWeights
from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.adapters.peft_files import AdapterReader
from antiphon.services.engine.adapters.shards import local_adapter
from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.parallel.shard import ALONE, Shard
from antiphon.shared.config import EngineSettings, SettingsError
from antiphon.shared.models.image_models import check_takes_images

logger = logging.getLogger(__name__)


def serves_adapters(settings: EngineSettings) -> bool:
    """Whether the engine serves adapters of any kind."""
    return settings.adapters.enable_lora or settings.adapters.enable_prompt_adapter


def check_extras(settings: EngineSettings, config: Mapping[str, Any]) -> None:
    """Raises `SettingsError` if images or adapters are enabled for a model that does not support them."""
    if settings.enable_mm:
        check_takes_images(config)
    if not serves_adapters(settings):
        return
    if not has_family(config):
        raise SettingsError(
            "--enable-lora, --enable-prompt-adapter: this architecture runs through transformers, where adapters are "
            "not computed; merge a LoRA adapter into the model's weights"
        )
    if settings.adapters.enable_lora and find_family(config).describe(config).latent is not None:
        raise SettingsError(
            "--enable-lora: this model has latent attention, where adapters are not computed; merge the LoRA adapter "
            "into the model's weights"
        )
    description = find_family(config).describe(config)
    if settings.adapters.enable_lora and (description.layer_heads or description.layer_kv_heads):
        raise SettingsError(
            "--enable-lora: the layers of this model have different heads or share keys, for which adapters are not "
            "computed; merge the LoRA adapter into the model's weights"
        )
    if settings.adapters.enable_prompt_adapter and find_family(config).describe(config).embedding_scale != 1.0:
        raise SettingsError(
            "--enable-prompt-adapter: this model scales its embeddings, and how virtual tokens are scaled differs "
            "between versions of transformers; prompt adapters are not served with it"
        )


def check_stages(settings: EngineSettings, config: Mapping[str, Any], shard: Shard) -> None:
    """Raises `SettingsError`, on every rank, if images add embeddings to layers that are not in the first stage."""
    if not settings.enable_mm or shard.pp_size == 1 or not has_family(config):
        return
    description = find_family(config).describe(config)
    first, needed = len(Shard(pp_size=shard.pp_size).layers(description.num_layers)), description.image_layers
    if first < needed:
        raise SettingsError(
            f"--pipeline-parallel-size: images of this model add embeddings to the outputs of its first {needed} "
            f"layers, and the first of {shard.pp_size} stages has {first}; use fewer stages"
        )


def make_library(
    settings: EngineSettings,
    config: Mapping[str, Any],
    prepare: Callable[[AdapterWeights], object],
    shard: Shard = ALONE,
) -> AdapterLibrary:
    """Returns the library of adapters for a model. `prepare` converts an adapter to the backend's form.

    Of several ranks (`shard`), only the first reads adapters. It keeps its own part; the others get theirs from it.
    """
    family = find_family(config)
    description = family.describe(config)

    def prepared(weights: AdapterWeights) -> object:
        return prepare(weights if shard.rank else local_adapter(weights, description, shard))

    reader = AdapterReader(
        family.layout(description),
        settings.adapters.max_lora_rank if settings.adapters.enable_lora else 0,
        settings.adapters.max_prompt_adapter_token if settings.adapters.enable_prompt_adapter else 0,
        description.hidden_size,
    )
    return AdapterLibrary(
        reader, prepared, settings.adapters.max_cpu_loras or 0, settings.adapters.max_prompt_adapters or 0
    )


def check_offload(settings: EngineSettings, device: torch.device) -> None:
    """Raises `SettingsError` if a worker that cannot do it is asked to keep weights of a GPU in the host's memory.

    On a CPU the option has no effect.
    """
    if not settings.cache.cpu_offload_gb:
        return
    if device.type != "cpu":
        raise SettingsError(
            f"--cpu-offload-gb: {settings.cache.cpu_offload_gb:g} GiB of weights can be kept in host memory only where "
            "Triton's kernels compute, and PyTorch's operations compute this model here. Leave it out; "
            "--quantization=ifq halves the weights, ifq_nf4 quarters them."
        )
    logger.info("--cpu-offload-gb changes nothing on a CPU: all weights are in host memory")
