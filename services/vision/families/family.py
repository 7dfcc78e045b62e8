"""What a family of picture models says about its processor and its encoder."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn


class Embedded(NamedTuple):
    """A picture as tokens: `embeddings` [rows * columns, hidden], row by row.

    A family whose tokens have no places in rows and columns gives one row.
    """

    rows: int
    columns: int
    embeddings: Tensor


class PictureFamily(ABC):
    """The processor and the encoder of one model.

    `module` has the encoder's weights, which are set after the construction, and is in the type `dtype`.
    """

    FIXED: ClassVar[frozenset[str]]
    """Arguments of the processor that the encoder's weights determine."""
    module: nn.Module
    token_id: int
    """The token that stands for a picture in the text of a prompt."""

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        """`config`: the model's config as an object of transformers; `fields`: arguments of the processor."""
        self.dtype = dtype

    @staticmethod
    @abstractmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the class of the model's image processor. `fields`: those that come with the model."""

    @staticmethod
    @abstractmethod
    def parameter(name: str) -> str | None:
        """Returns the name in `module` of a tensor of the checkpoint; None if it is not the encoder's."""

    @abstractmethod
    def embed(self, picture: Image.Image, device: str) -> Embedded:
        """Returns a picture with three colours as tokens. `module` is on the device."""
