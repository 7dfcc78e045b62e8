"""Idefics 3 and SmolVLM: an image is cut into tiles of the encoder's size; a small copy of the whole image follows.

Each tile has the same number of tokens, after a text that names its row and column (`<row_1_col_2>`). The checkpoint's
tokenizer decides whether such a name is one token or several, so the tokens of an image are those of that text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.idefics3.image_processing_pil_idefics3 import MAX_IMAGE_SIZE, Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from antiphon.services.vision.families.family import Embedded, named_token, special_token, token_texts
from antiphon.services.vision.families.tower import TowerImages
from antiphon.shared.flags import SettingsError


class Idefics3Images(TowerImages):
    """See ImageFamily."""

    FIXED = frozenset({"max_image_size", "do_pad", "return_row_col_info"})
    PARTS: ClassVar[tuple[str, ...]] = ("vision_model.", "connector.")
    DECODER: ClassVar[str] = "text_model"

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, {**fields, "return_row_col_info": True}, dtype, directory)
        [self._image] = token_texts(directory, self.token_id)
        self._around = special_token(directory, "fake_image_token", "<fake_token_around_image>")
        self._whole = named_token(directory, "global_image_token", "<global-img>")
        self._tokenizer = _tokenizer(directory)

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return SmolVLMImageProcessorPil if config.model_type == "smolvlm" else Idefics3ImageProcessorPil

    def tiles_max(self) -> int:
        """See TowerImages. If an image is cut, a small copy of the whole image is one more tile."""
        processor = self._processor
        side = -(-min(processor.size["longest_edge"], MAX_IMAGE_SIZE) // processor.max_image_size["longest_edge"])
        return 1 + side * side if processor.do_image_splitting and side > 1 else 1

    def tokens_max(self) -> int:
        """See ImageFamily."""
        return self.patches_max() // self._config.scale_factor**2

    def embed(self, image: Image.Image, device: str) -> Embedded:
        """See ImageFamily."""
        found = self._processor(image, return_tensors="pt")
        # The processor returns a batch of one list, which has the tiles of this image.
        pixels = found["pixel_values"][0].to(device=device, dtype=self.dtype)
        [[rows]], [[columns]] = found["rows"], found["cols"]
        model: Any = self.module
        # Not get_image_features, which leaves out tiles whose pixels are all zero.
        tiles = model.connector(model.vision_model(pixel_values=pixels, return_dict=True).last_hidden_state)
        layout = self._layout(rows, columns, tiles.shape[1])
        return Embedded(1, tiles.shape[0] * tiles.shape[1], tiles.flatten(0, 1), layout)

    def _layout(self, rows: int, columns: int, tokens_of_tile: int) -> tuple[int, ...]:
        """Returns the tokens of an image with these rows and columns of tiles. With 0 rows it has only the small copy.

        The text is that of `Idefics3Processor`, but with one image token for each tile, which is then repeated.
        """
        tiles = [
            "".join(f"{self._around}<row_{row}_col_{column}>{self._image}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        text = "".join((*tiles, "\n" if rows else "", self._around, self._whole, self._image, self._around))
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(token for each in ids for token in ([each] * tokens_of_tile if each == self.token_id else [each]))


def _tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions for files that it cannot read
        raise SettingsError(f"--enable-mm: {path} cannot be read: {error}") from error
    # The file may cut or pad texts as it was done in training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
