"""Settings about pictures, of engines, gateways and image services."""

from shared.flags import flag
from shared.settings.base import Settings


class EnginePictureSettings(Settings):
    """Settings of an engine."""

    enable_mm: bool = flag(
        False,
        "accept images in conversations, with a model that has a vision encoder, such as Gemma 3 (docs/images.md)",
        alias=("--enabe-mm",),
        group="pictures",
    )


class GatewayPictureSettings(Settings):
    """Settings of a gateway."""

    allowed_media_domains: str = flag(
        "",
        "hosts from which images may be fetched by URL, separated by commas; .example.org: all hosts below it "
        "(default: none)",
        group="pictures",
    )
    limit_mm_per_prompt: str = flag(
        "",
        'largest number of images in a request, image=N or JSON such as {"image": 4}; N from 0 to 32 (default: 32)',
        group="pictures",
        metavar="image=N",
    )
