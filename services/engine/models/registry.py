"""Maps architecture names in config.json files to families.

To add a family, name its module in the imports and in the list here.
"""

from dataclasses import replace
from typing import Protocol

from services.engine.models import llava
from services.engine.models.config_fields import Config, config_error
from services.engine.models.description import DecoderDescription
from services.engine.models.families import (
    baichuan,
    chatglm,
    cohere2,
    deepseek,
    ernie,
    ernie_moe,
    exaone4,
    falcon,
    gemma,
    glm,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    internlm2,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen_moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from services.engine.models.layout import Parameter
from services.engine.models.text_parts import TEXT_PARTS


class Family(Protocol):
    """The interface of a family's module."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """The architecture names in config.json that belong to this family."""
        ...

    @staticmethod
    def describe(config: Config) -> DecoderDescription:
        """Returns the description of the decoder that a config.json specifies."""
        ...

    @staticmethod
    def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
        """Returns the parameters with the checkpoint tensors that make up each of them."""
        ...


FAMILIES: tuple[Family, ...] = (
    baichuan, chatglm, cohere2, deepseek, ernie, ernie_moe, exaone4, falcon, gemma, glm, glm4_moe, gpt2, gpt_neox,
    gpt_oss, granite, hunyuan, internlm2, llama, llava, minimax_m2, mistral, mixtral, olmo2, opt, phi3, qwen, qwen2,
    qwen2_vl, qwen3, qwen_moe, seed_oss, smollm3, starcoder2,
    *TEXT_PARTS,
)  # fmt: skip


class _WithoutHead:
    """A family of checkpoints without a language model head, such as those of embedding models."""

    def __init__(self, family: Family) -> None:
        self.ARCHITECTURES = tuple(map(without_head, family.ARCHITECTURES))
        self._family = family

    def describe(self, config: Config) -> DecoderDescription:
        """See Family."""
        if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
            raise config_error("attention to later tokens is not supported.")
        return replace(self._family.describe(config), tied_embeddings=True, normalised_head=False, has_head=False)

    def layout(self, description: DecoderDescription, /) -> tuple[Parameter, ...]:
        """See Family."""
        return self._family.layout(description)


def without_head(name: str) -> str:
    """Returns the architecture name of the same decoder without its language model head."""
    return name.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")


_BY_ARCHITECTURE: dict[str, Family] = {
    name: family for each in FAMILIES for family in (_WithoutHead(each), each) for name in family.ARCHITECTURES
}


def supported_architectures() -> list[str]:
    """Returns the supported architecture names, sorted, without those of decoders without a head (`without_head`)."""
    return sorted(name for family in FAMILIES for name in family.ARCHITECTURES)


def has_family(config: Config) -> bool:
    """Whether `find_family` finds a family for this config."""
    return any(name in _BY_ARCHITECTURE for name in config.get("architectures") or [])


def find_family(config: Config) -> Family:
    """Returns the family of the first supported architecture. Raises `ServiceError` that lists the supported ones."""
    names = config.get("architectures") or []
    for name in names:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    asked = ", ".join(map(str, names)) or "none at all"
    raise config_error(f"architecture {asked} is not supported; supported: {', '.join(supported_architectures())}.")
