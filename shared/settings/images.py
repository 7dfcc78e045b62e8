"""Settings about images, of engines, gateways and image services."""

from antiphon.shared.flags import Settings, flag


class EngineImageSettings(Settings, group="images"):
    """Settings of an engine."""

    enable_mm: bool = flag(
        False,
        "accept images in conversations, with a model that has a vision encoder (docs/guides/images.md)",
        hidden=("--enabe-mm",),
    )


class GatewayImageSettings(Settings, group="images"):
    """Settings of a gateway."""

    allowed_media_domains: str = flag(
        "",
        "hosts from which images may be fetched by URL, separated by commas; .example.org: all hosts below it "
        "(default: none)",
    )
    limit_mm_per_prompt: str = flag(
        "",
        'largest number of images in a request, image=N or JSON such as {"image": 4}; N from 0 to 32 (default: 32)',
        metavar="image=N",
    )
