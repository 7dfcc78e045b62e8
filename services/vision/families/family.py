"""The base class of families of vision models: processor and encoder."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from antiphon.shared.flags import SettingsError


class Embedded(NamedTuple):
    """An image as tokens: `embeddings` [rows * columns, width], row by row. `width`: see `PlacedImage`.

    If a family's tokens have no positions in rows and columns, there is one row.
    """

    rows: int
    columns: int
    embeddings: Tensor
    layout: tuple[int, ...] = ()
    """The image's tokens in a prompt, if there are other tokens between the image tokens (`token_id`)."""


class ImageFamily(ABC):
    """The processor and the encoder of one model.

    `module` contains the encoder in the type `dtype`; its weights are set after construction.
    """

    FIXED: ClassVar[frozenset[str]]
    """Arguments of the processor that are determined by the encoder's weights."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Arguments that the model's processor class passes to the image processor, overriding the model's file."""
    module: nn.Module
    token_id: int
    """The image token, which marks an image's place in a prompt."""
    place: str = ""
    """Placeholder of an image in the prompt's text, which `text` replaces before tokenization; empty: the image token.
    """
    text: str = ""
    """The text of an image for the model: the image token once, with its required surroundings."""

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        """`config`: the model's config as a transformers object; `fields`: arguments of the processor.

        `directory`: the model's directory. Raises SettingsError.
        """
        self.dtype = dtype
        self._config = config

    @staticmethod
    @abstractmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the class of the model's image processor. `fields`: the fields of the model's processor file."""

    @abstractmethod
    def parameter(self, name: str) -> str | None:
        """Returns the name in `module` of a checkpoint tensor; None if it does not belong to the encoder."""

    @abstractmethod
    def patches_max(self) -> int:
        """Returns how many patches the largest image has, those of all its tiles together.

        It follows from the processor's arguments; `antiphon plan` predicts the memory of a service with it.
        """

    def tokens_max(self) -> int:
        """Returns how many embeddings the largest image has, before any are left out."""
        return self.patches_max()

    @property
    def width(self) -> int:
        """Width of the encoder, which Qwen2-VL calls `embed_dim`."""
        vision = self._config.vision_config
        return getattr(vision, "embed_dim", None) or vision.hidden_size

    def mlp_width(self) -> int:
        """Returns the width of the encoder's MLPs between their two matrices."""
        vision = self._config.vision_config
        return getattr(vision, "intermediate_size", None) or int(self.width * vision.mlp_ratio)

    def projected_width(self) -> int:
        """Returns the width of the rows after the encoder. There is one row for each token."""
        return self._config.text_config.hidden_size

    def mask_bytes(self) -> int:
        """Returns the bytes of the masks that tell the encoder which patches belong together."""
        return 0

    @abstractmethod
    def embed(self, image: Image.Image, device: str) -> Embedded:
        """Returns the tokens of an RGB image. `module` is on the device."""


def token_texts(directory: Path, *ids: int) -> list[str]:
    """Returns the texts of a model's special tokens. Raises SettingsError if its tokenizer lacks one."""
    texts = {token["id"]: token["content"] for token in _added_tokens(directory)}
    return [_known(texts, token_id, directory) for token_id in ids]


def token_ids(directory: Path, *texts: str) -> list[int]:
    """Returns the ids of a model's special tokens. Raises SettingsError if its tokenizer lacks one."""
    ids = {token["content"]: token["id"] for token in _added_tokens(directory)}
    return [_known(ids, text, directory) for text in texts]


def special_token(directory: Path, name: str, usual: str) -> str:
    """Returns the text of a token that tokenizer_config.json names; `usual` if it does not.

    Raises SettingsError if it is not one of the tokenizer's added tokens.
    """
    text = named_token(directory, name, usual)
    token_ids(directory, text)
    return text


def named_token(directory: Path, name: str, usual: str) -> str:
    """Returns the text that tokenizer_config.json gives a name; `usual` if it does not.

    The tokenizer may read it as several tokens.
    """
    config = read_object(directory / "tokenizer_config.json")
    further = config.get("extra_special_tokens")
    found = (further.get(name) if isinstance(further, dict) else None) or config.get(name) or usual
    return str(found["content"] if isinstance(found, dict) else found)


def _added_tokens(directory: Path) -> list[dict[str, Any]]:
    return read_object(directory / "tokenizer.json").get("added_tokens") or []


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a model's directory. Raises SettingsError if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(f"--enable-mm: {path} cannot be read as a JSON object: {error}") from error


def _known(found: Mapping[Any, Any], name: object, directory: Path) -> Any:
    if name not in found:
        raise SettingsError(
            f"--enable-mm: the tokenizer in {directory} does not have the token {name!r}, which this model has in "
            "prompts with images"
        )
    return found[name]
