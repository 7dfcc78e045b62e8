"""Settings of an image service. See `shared.config`."""

from dataclasses import dataclass

from shared.config import ModelSettings, flag


@dataclass(frozen=True, kw_only=True)
class VisionSettings(ModelSettings):
    """Settings of an image service."""

    mm_processor_kwargs: str = flag(
        "", 'arguments of the image processor, JSON such as {"max_pixels": 501760}', group="pictures", metavar="JSON"
    )
    vision_device: str = flag("cpu", "where pictures are encoded", choices=("cpu", "cuda"), group="pictures")
