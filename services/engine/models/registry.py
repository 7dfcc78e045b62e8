"""Maps architecture names in config.json files to families.

Each module in `families` is one; nothing else names them. Installed packages add theirs by entry points of the group
`antiphon.model_families`, whose modules take precedence.
"""

import pkgutil
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

from antiphon.services.engine.models import families
from antiphon.services.engine.models.config_fields import Config, config_error
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Parameter
from antiphon.services.engine.models.text_parts import TEXT_PARTS
from antiphon.shared.actors.imports import plug_ins


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


_MODULES = pkgutil.iter_modules(families.__path__, f"{families.__name__}.")
FAMILIES: tuple[Family, ...] = (
    *(cast(Family, import_module(one.name)) for one in _MODULES),
    *TEXT_PARTS,
    *plug_ins("model_families"),
)


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
