"""Settings about pictures that engines and gateways have among others. See `shared.config`."""

from dataclasses import dataclass

from shared.flags import flag


@dataclass(frozen=True, kw_only=True)
class TakesPictures:
    """Of an engine."""

    enable_mm: bool = flag(
        False,
        "take pictures in conversations, with a model that has a vision encoder (Qwen2-VL, Qwen2.5-VL)",
        alias=("--enabe-mm",),
        group="pictures",
    )


@dataclass(frozen=True, kw_only=True)
class FetchesPictures:
    """Of a gateway."""

    allowed_media_domains: str = flag(
        "",
        "hosts of pictures that requests name by URL, by commas; .example.org: all hosts under it (default: none)",
        group="pictures",
    )
