"""What works with a model, computed from its config.json by the functions that refuse what does not work."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from antiphon.services.engine.backends.cpu.worker import cannot_serve
from antiphon.services.engine.backends.load import triton_cannot_serve
from antiphon.services.engine.backends.torch.own_cache import kinds as own_cache
from antiphon.services.engine.backends.torch.whole_text import kinds as whole_text
from antiphon.services.engine.core.plan import EngineFacts
from antiphon.services.engine.engine import core_limits
from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.parallel.shard import Shard, local_description
from antiphon.services.engine.quantizer.job import Job
from antiphon.services.engine.quantizer.plan import make_plan
from antiphon.services.engine.worker.extras import check_extras
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.gguf_model.config import supported_architectures
from infra.checks.models.examples import BACKENDS, Config
from tests import gguf_files

NONE, YES = "–", "yes"
COLUMNS = ("backends", "batched", "prefix cache", "LoRA", "tensor parallel", "`antiphon quantize`", "GGUF", "pictures")


@dataclass(frozen=True, slots=True)
class Facts:
    """The cells of `COLUMNS`."""

    cells: tuple[str, ...]


def facts(config: Config) -> Facts:
    """Returns the facts about the model of a config.json."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        settings = EngineSettings(model=directory, device="cpu")
        cells = (
            _backends(settings, Path(directory)),
            _said(_batched(config)),
            _said(_caches_prefixes(settings, config)),
            _said(_serves_adapters(config)),
            _said(_divides(config)),
            _said(_quantizes(config)),
            _gguf(config),
            _images(config, Path(directory)),
        )
    return Facts(cells)


def joined(all_facts: set[Facts]) -> Facts:
    """Returns the facts of an architecture from those of its examples, which may differ."""
    columns = zip(*(each.cells for each in all_facts), strict=True)
    return Facts(tuple(" or ".join(sorted(set(column), reverse=True)) for column in columns))


def _said(works: bool) -> str:
    return YES if works else NONE


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (SettingsError, ServiceError):
        return False
    return True


def _backends(settings: EngineSettings, directory: Path) -> str:
    found = {
        "native": cannot_serve(settings, directory) is None,
        "triton": triton_cannot_serve(settings, directory) is None,
        "torch": True,
    }
    return ", ".join(name for key, name in BACKENDS.items() if found[key])


def _batched(config: Config) -> bool:
    if whole_text.computes_whole(config):
        return whole_text.BATCHED
    return own_cache.BATCHED if own_cache.keeps_own_cache(config) else True


def _caches_prefixes(settings: EngineSettings, config: Config) -> bool:
    engine = EngineFacts(
        num_blocks=1,
        block_size=16,
        max_model_len=16,
        vocab_size=1,
        computes_whole=whole_text.COMPUTES_WHOLE if whole_text.computes_whole(config) else False,
        keeps_states=own_cache.KEEPS_STATES if own_cache.keeps_own_cache(config) else False,
    )
    return core_limits(settings, engine).enable_prefix_caching


def _serves_adapters(config: Config) -> bool:
    return _works(lambda: check_extras(EngineSettings(enable_lora=True), config))


def _divides(config: Config) -> bool:
    """Whether two devices can share each layer. Models without a family run in one process."""
    return has_family(config) and _works(
        lambda: local_description(find_family(config).describe(config), Shard(tp_size=2))
    )


def _quantizes(config: Config) -> bool:
    job = Job(model=Path(), output=Path(), algorithm="weight_only_int8", tensor_parallel=1, dtype="bf16")

    def plan() -> Any:
        family = find_family(config)
        description = family.describe(config)
        return make_plan(description, family.layout(description), job)

    return _works(plan)


def _gguf(config: Config) -> str:
    if not has_family(config):
        return NONE
    served = supported_architectures()
    if untested := set(served).difference(gguf_files.ARCHITECTURES.values()):
        raise ValueError(f"no test writes a GGUF file of {', '.join(untested)}: add it to tests/gguf_files.py")
    name = gguf_files.architecture_of(config)
    return f"`{name}`" if name in served else NONE


def _images(config: Config, directory: Path) -> str:
    settings = EngineSettings(model=str(directory), device="cpu", enable_mm=True)
    if not has_family(config) or not _works(lambda: check_extras(settings, config)):
        return NONE
    return _backends(settings, directory)
