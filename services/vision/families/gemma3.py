"""Gemma 3: a SigLIP encoder; patches are averaged to 256 tokens, surrounded by line breaks and two special tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from antiphon.services.vision.families.family import token_texts
from antiphon.services.vision.families.tower import TowerImages
from antiphon.shared.flags import SettingsError


class Gemma3Images(TowerImages):
    """See ImageFamily."""

    FIXED = frozenset({"size", "do_resize"})
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"do_pan_and_scan": False}

    def __init__(self, config: Any, fields: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
        super().__init__(config, fields, dtype, directory)
        if fields.get("do_pan_and_scan"):
            raise SettingsError(
                "--mm-processor-kwargs: images of Gemma 3 are not cut into further ones: leave out do_pan_and_scan"
            )
        begin, token, end = token_texts(directory, config.boi_token_id, config.image_token_id, config.eoi_token_id)
        self.place, self.text = begin, f"\n\n{begin}{token}{end}\n\n"

    def tokens_max(self) -> int:
        """See ImageFamily."""
        return self._config.mm_tokens_per_image

    @staticmethod
    def processor(config: Any, fields: Mapping[str, Any]) -> Any:
        """See ImageFamily."""
        return Gemma3ImageProcessorPil
