"""Architecture names of config.json files → family. A new family is one file and its name, twice, here."""

from typing import Protocol

from services.engine.models import (
    baichuan,
    chatglm,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    internlm2,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen,
    qwen2,
    qwen3,
    qwen_moe,
    starcoder2,
)
from services.engine.models.config_fields import Config, config_error
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import Parameter


class Family(Protocol):
    """What a family file has."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """The names in config.json that mean this family."""
        ...

    @staticmethod
    def describe(config: Config) -> DecoderDescription:
        """The decoder that a config.json stands for."""
        ...

    @staticmethod
    def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
        """The checkpoint's tensors behind every parameter."""
        ...


FAMILIES: tuple[Family, ...] = (
    baichuan, chatglm, falcon, gemma, glm, gpt2, gpt_neox, internlm2, llama, mistral, mixtral, opt, phi3, qwen, qwen2,
    qwen3, qwen_moe, starcoder2,
)  # fmt: skip
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.ARCHITECTURES}


def supported_architectures() -> list[str]:
    """The names that have a family, sorted."""
    return sorted(_BY_ARCHITECTURE)


def has_family(config: Config) -> bool:
    """Whether `find_family` finds one."""
    return any(name in _BY_ARCHITECTURE for name in config.get("architectures") or [])


def find_family(config: Config) -> Family:
    """The family of the first architecture that is known. Raises `ServiceError` naming those that are supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    asked = ", ".join(map(str, names)) or "none at all"
    raise config_error(f"architecture {asked} is not supported; supported: {', '.join(supported_architectures())}.")
