"""Reads the configuration of an adapter directory in peft's format: `adapter_config.json`. Reads no weights.

An adapter is refused, with the name of the field, if it changes the model in an unsupported way, because its outputs
would be wrong. Called by the launcher before it starts anything, and by engines.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from antiphon.shared.errors import ServiceError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MERGE = "merge the adapter into the model's weights (peft: merge_and_unload) and serve these"
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA adapters are not supported",
    "modules_to_save": "whole modules in an adapter (modules_to_save) are not supported",
    "trainable_token_indices": "trained token embeddings are not supported",
    "layer_replication": "replicated layers are not supported",
    "target_parameters": "adapters of single parameters, such as those of fused experts, are not supported",
    "megatron_config": "adapters of parallel Megatron layers are not supported",
    "lora_bias": "biases of adapters (lora_bias) are not supported",
    "alora_invocation_tokens": "activated LoRA, which begins at certain tokens, is not supported",
    "use_qalora": "QA-LoRA adapters are not supported",
}
"""Fields of peft's configuration that must be empty or false, each with the reason."""
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Prefixes of `init_lora_weights` that mean that the adapter belongs to a changed copy of the model's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The configuration of a LoRA adapter. `rank` and `alpha` apply to modules without their own entry."""

    rank: int
    alpha: float
    rank_stabilised: bool = False
    """rsLoRA: the scale is alpha / sqrt(rank) instead of alpha / rank."""
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ranks of modules, by a regular expression for the end of the module's name."""
    alphas: Mapping[str, float] = field(default_factory=dict[str, float])
    base_model: str = ""

    @property
    def rank_max(self) -> int:
        """The largest rank of any module."""
        return max((self.rank, *self.ranks.values()))

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, given by its name in the model."""
        return int(_of_module(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's product."""
        rank = self.rank_of(module)
        return _of_module(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """The configuration of a prompt adapter (prompt tuning): vectors of virtual tokens before the prompt."""

    num_virtual_tokens: int
    base_model: str = ""


def read_lora_config(directory: Path, name: str) -> LoraConfig:
    """Returns the configuration of a LoRA adapter. `name` is the adapter's name, for errors.

    Raises ServiceError: `not_found` if there is no adapter, `invalid_value` if it cannot be served.
    """
    fields = _read(directory, name)
    if fields.get("peft_type") != "LORA":
        raise unusable(name, f"its peft_type is {fields.get('peft_type')!r}, not 'LORA'")
    for key, reason in _REFUSED.items():
        if fields.get(key):
            raise unusable(name, f"{reason} ('{key}' in {CONFIG_FILE}): {_MERGE}")
    if fields.get("bias", "none") != "none":
        raise unusable(name, f"biases in an adapter ('bias': {fields['bias']!r}) are not supported: {_MERGE}")
    kind = fields.get("init_lora_weights")
    if isinstance(kind, str) and kind.lower().startswith(_CHANGES_THE_BASE):
        raise unusable(
            name,
            f"it belongs to changed weights of the model ('init_lora_weights': {kind!r}): save it with peft's "
            "path_initial_model_for_weight_conversion",
        )
    return LoraConfig(
        rank=_whole(fields, "r", name),
        alpha=_number(fields.get("lora_alpha", 8), "lora_alpha", name),
        rank_stabilised=bool(fields.get("use_rslora", False)),
        ranks={key: _at_least_1(value, "rank_pattern", name) for key, value in _pattern(fields, "rank_pattern", name)},
        alphas={key: _number(value, "alpha_pattern", name) for key, value in _pattern(fields, "alpha_pattern", name)},
        base_model=str(fields.get("base_model_name_or_path") or ""),
    )


def read_prompt_config(directory: Path, name: str) -> PromptConfig:
    """Returns the configuration of a prompt adapter. Raises the same errors as `read_lora_config`."""
    fields = _read(directory, name)
    if fields.get("peft_type") != "PROMPT_TUNING":
        raise unusable(
            name, f"its peft_type is {fields.get('peft_type')!r}; of prompt adapters only 'PROMPT_TUNING' is served"
        )
    count = _whole(fields, "num_virtual_tokens", name)
    return PromptConfig(count, str(fields.get("base_model_name_or_path") or ""))


def check_rank(config: LoraConfig, name: str, max_rank: int) -> None:
    """Raises ServiceError if the adapter's rank exceeds the engine's maximum."""
    if config.rank_max > max_rank:
        raise unusable(
            name,
            f"its rank is {config.rank_max}, above --max-lora-rank={max_rank}: start with a larger --max-lora-rank",
        )


def check_tokens(config: PromptConfig, name: str, most: int) -> None:
    """Raises ServiceError if the prompt adapter has more virtual tokens than the engine's maximum."""
    if config.num_virtual_tokens > most:
        raise unusable(
            name,
            f"it has {config.num_virtual_tokens} virtual tokens, more than --max-prompt-adapter-token={most}: start "
            "with a larger one",
        )


def adapter_kind(directory: Path, name: str) -> str:
    """Returns `peft_type` of the adapter. Raises the same errors as `read_lora_config`."""
    return str(_read(directory, name).get("peft_type"))


def unusable(name: str, why: str) -> ServiceError:
    """Returns the error for an adapter that cannot be served."""
    return ServiceError("invalid_value", f"The adapter {name!r} cannot be served: {why}.", param="lora_path")


def no_file(name: str, directory: Path, file: str) -> ServiceError:
    """Returns the error for an adapter without one of its files.

    It is the same whatever the reason is, so that a client cannot find out what there is on the engine's machine.
    """
    why = f"there is no directory {directory} with a file {file} that can be read"
    return ServiceError("not_found", f"The adapter {name!r} cannot be served: {why}.", param="lora_path")


def adapter_directory(path: str) -> Path:
    """Returns the directory of an adapter, with `~` replaced by the home directory if there is one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file. Raises OSError for anything else, such as a pipe, which would not be readable for ever."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path has no such character")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def _read(directory: Path, name: str) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        with open_regular(path) as file:
            fields: Any = json.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise no_file(name, directory, CONFIG_FILE) from error
    except ValueError as error:
        raise unusable(name, f"{path} is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise unusable(name, f"{path} must hold a JSON object")
    return cast(dict[str, Any], fields)


def _of_module(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Returns the value of the first pattern that matches the module's name, with peft's rules."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _pattern(fields: Mapping[str, Any], key: str, name: str) -> list[tuple[str, Any]]:
    table: Any = fields.get(key) or {}
    if not isinstance(table, dict):
        raise unusable(name, f"'{key}' in {CONFIG_FILE} must be an object")
    items = list(cast(dict[str, Any], table).items())
    for pattern, _ in items:
        try:
            re.compile(pattern)
        except re.error as error:
            raise unusable(name, f"'{key}' in {CONFIG_FILE} has {pattern!r}, which is no regular expression") from error
    return items


def _whole(fields: Mapping[str, Any], key: str, name: str) -> int:
    return _at_least_1(fields.get(key), key, name)


def _at_least_1(value: object, key: str, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise unusable(name, f"'{key}' in {CONFIG_FILE} must be a whole number of at least 1, not {value!r}")
    return value


def _number(value: object, key: str, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise unusable(name, f"'{key}' in {CONFIG_FILE} must be a number, not {value!r}")
    return float(value)
