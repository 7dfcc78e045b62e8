"""Decides whether a worker loads the draft layer of a checkpoint (`--use-mtp`), and says why if it does not.

Called by the workers before they load the weights, and by the prediction of memory.
"""

import itertools
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from antiphon.services.engine.models.config_fields import Config
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.kv_groups import freeing_windows
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.parallel.shard import ALONE, Shard
from antiphon.services.engine.worker.capacity.context import served_description
from antiphon.services.engine.worker.loading.weight_files import open_safetensors, weight_files
from antiphon.shared.config import EngineSettings

logger = logging.getLogger(__name__)

_SUFFIX, _GGUF, _INDEX = ".safetensors", ".gguf", "model.safetensors.index.json"


def drafting_description(
    settings: EngineSettings, model_dir: Path, config: Config, shard: Shard = ALONE
) -> DecoderDescription:
    """Returns the description of a config's decoder as it is served: with its draft layer if that is to be used."""
    description = served_description(settings, config)
    if not settings.scheduler.use_mtp:
        return description
    reason = _reason_against(description, model_dir, config, shard)
    if reason is None:
        drafting = description.with_draft_layer()
        return freeing_windows(drafting) if description.kv_groups else drafting
    if shard.rank == 0:
        logger.warning("--use-mtp has no effect: %s", reason)
    return description


def no_draft_layer(settings: EngineSettings, because: str) -> None:
    """Logs that a worker uses no draft layer, if the settings ask for it."""
    if settings.scheduler.use_mtp:
        logger.warning("--use-mtp has no effect: %s", because)


def _reason_against(description: DecoderDescription, model_dir: Path, config: Config, shard: Shard) -> str | None:
    if not description.offers_draft_layer or not description.has_head:
        return "this model has no layer that predicts further tokens, or it is not known here"
    if shard.pp_size > 1:
        return "the layer that predicts further tokens needs all layers on one device; use --tensor-parallel-size"
    found = _tensor_names(model_dir)
    if found is None:
        return "the layer that predicts further tokens is read from safetensors and GGUF files only"
    parameters = find_family(config).layout(description.with_draft_layer())
    # Norms, whose tensors have the same names whether the checkpoint is quantized or not.
    needed = {
        source.name for one in parameters if ".draft_" in one.name and "norm" in one.name for source in one.sources
    }
    if not needed <= set(found):
        return "the checkpoint lacks the layer that predicts further tokens"
    return None


def _tensor_names(model_dir: Path) -> Iterable[str] | None:
    """Returns the names of the checkpoint's tensors; None if it is in PyTorch's format."""
    files = weight_files(model_dir)
    if files[0].suffix == _GGUF:
        # Imported here because the package `gguf` is slow to import.
        from antiphon.services.engine.worker.loading.gguf_file import GgufFile

        return GgufFile(files).keys()
    if any(path.suffix != _SUFFIX for path in files):
        return None
    if (index := model_dir / _INDEX).is_file() and len(files) > 1:
        return json.loads(index.read_bytes())["weight_map"].keys()
    return itertools.chain.from_iterable(open_safetensors(path, "np").keys() for path in files)
