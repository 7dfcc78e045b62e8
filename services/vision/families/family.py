"""What a family of picture models says about its processor and its encoder."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from shared.config import SettingsError


class Embedded(NamedTuple):
    """A picture as tokens: `embeddings` [rows * columns, width], row by row. `width`: see `PlacedPicture`.

    A family whose tokens have no places in rows and columns gives one row.
    """

    rows: int
    columns: int
    embeddings: Tensor
    layout: tuple[int, ...] = ()
    """The tokens of the picture in a prompt, if there are others between those with embeddings (`token_id`)."""


class PictureFamily(ABC):
    """The processor and the encoder of one model.

    `module` has the encoder's weights, which are set after the construction, and is in the type `dtype`.
    """

    FIXED: ClassVar[frozenset[str]]
    """Arguments of the processor that the encoder's weights determine."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Arguments that the model's own processor gives the image processor, whatever the file with the model says."""
    module: nn.Module
    token_id: int
    """The token that stands for a picture in the text of a prompt."""
    place: str = ""
    """What the text of a prompt has in the place of a picture and `text` replaces before it is tokenized; empty: it has
    the token there."""
    text: str = ""
    """What the model expects around the tokens of a picture, with the token once."""

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        """`config`: the model's config as an object of transformers; `fields`: arguments of the processor.

        `directory`: that of the model. Raises SettingsError.
        """
        self.dtype = dtype
        self._config = config

    @staticmethod
    @abstractmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the class of the model's image processor. `fields`: those that come with the model."""

    @abstractmethod
    def parameter(self, name: str) -> str | None:
        """Returns the name in `module` of a tensor of the checkpoint; None if it is not the encoder's."""

    @abstractmethod
    def patches_max(self) -> int:
        """Returns how many patches the largest picture has, those of all its tiles together.

        It follows from the processor's arguments; `antiphon plan` predicts the memory of a service with it.
        """

    def tokens_max(self) -> int:
        """Returns how many embeddings the largest picture has, before any are left out."""
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
        """Returns the width of the rows behind the encoder, of which there is one for each token."""
        return self._config.text_config.hidden_size

    def mask_bytes(self) -> int:
        """Returns the bytes of the masks with which the encoder says which patches belong together."""
        return 0

    @abstractmethod
    def embed(self, picture: Image.Image, device: str) -> Embedded:
        """Returns a picture with three colours as tokens. `module` is on the device."""


def token_texts(directory: Path, *ids: int) -> list[str]:
    """Returns the texts of special tokens of a model. Raises SettingsError for one that its tokenizer does not have."""
    texts = {token["id"]: token["content"] for token in _added_tokens(directory)}
    return [_known(texts, token_id, directory) for token_id in ids]


def token_ids(directory: Path, *texts: str) -> list[int]:
    """Returns the ids of special tokens of a model. Raises SettingsError for one that its tokenizer does not have."""
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
    """Returns a JSON object of a model's directory. Raises SettingsError if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(f"--enable-mm: {path} cannot be read as a JSON object: {error}") from error


def _known(found: Mapping[Any, Any], name: object, directory: Path) -> Any:
    if name not in found:
        raise SettingsError(
            f"--enable-mm: the tokenizer in {directory} does not have the token {name!r}, which this model has in "
            "prompts with pictures"
        )
    return found[name]
