"""Images in the offline API: reads them and encodes them in this process with the image service's library.

    bytes of a file or PIL.Image → VisionEncoder → embeddings, tokens and places in the prompt → PlacedImage

Equal images are encoded once while their embeddings are cached (`VISION_CACHE_BYTES`).
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from antiphon.services.engine.core.plan import PlacedImage
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ImageTokens
from antiphon.shared.models.image_models import processor_kwargs
from antiphon.shared.models.model_files import model_directory
from antiphon.shared.request.images import ImageInput, ImageUrl, TakeImage, check_detail, plain_places, read_image_url
from antiphon.shared.structures.byte_cache import ByteCache

if TYPE_CHECKING:
    from PIL.Image import Image

    from antiphon.services.vision.encoder import EncodedImage, VisionEncoder

_PIL_SCHEME = "pil:"
NOT_ENABLED = "this model was loaded for text: create the LLM with enable_mm=True and a model that takes images"


class EncodedPrompt:
    """The encoded images of one prompt."""

    def __init__(self, encoder: "VisionEncoder", images: Sequence["tuple[bytes, EncodedImage]"]) -> None:
        self._encoder, self._images = encoder, images

    @property
    def tokens(self) -> list[ImageTokens]:
        """Data about each image for the tokenization."""
        by = self._encoder
        return [
            ImageTokens(
                token_id=by.token_id,
                num_tokens=one.num_tokens,
                key=key,
                place=by.place,
                text=by.text,
                layout=one.layout,
            )
            for key, one in self._images
        ]

    def placed(self, starts: Sequence[int]) -> tuple[PlacedImage, ...]:
        """Returns the images, placed at their first tokens in the prompt."""
        return tuple(
            PlacedImage(
                start=start,
                num_tokens=one.num_tokens,
                rows=one.rows,
                columns=one.columns,
                key=key,
                embeddings=one.embeddings,
                dtype=one.dtype,
                plain=plain_places(one.layout, self._encoder.token_id),
            )
            for start, (key, one) in zip(starts, self._images, strict=True)
        )


class ImageEncoder:
    """The vision encoder of an offline engine. May be used by several threads.

    The constructor raises SettingsError for a model without vision encoder or for arguments unknown to its processor.
    """

    def __init__(self, settings: EngineSettings, arguments: str, limit: int) -> None:
        """`arguments`: arguments of the model's image processor, as JSON.

        `limit`: largest number of images per prompt.
        """
        import torch

        from antiphon.services.vision.encoder import VisionEncoder

        directory = model_directory(settings)
        self._encoder = VisionEncoder(directory, processor_kwargs(arguments), torch.float32, "cpu")
        self._limit = limit
        self._cache = ByteCache["EncodedImage"](limits.VISION_CACHE_BYTES)
        self._lock = threading.Lock()

    def encoded(self, images: "Sequence[bytes | Image]") -> EncodedPrompt:
        """Returns the encoded images of a prompt. Raises ValueError for too many images or an invalid one."""
        if len(images) > self._limit:
            raise ValueError(
                f"The prompt has {len(images)} images; at most {self._limit} are taken (limit_mm_per_prompt)."
            )
        return EncodedPrompt(self._encoder, [self._one(image) for image in images])

    def _one(self, given: "bytes | Image") -> "tuple[bytes, EncodedImage]":
        from antiphon.services.vision.images import checked_image, open_image

        try:
            image = open_image(given) if isinstance(given, bytes) else checked_image(given)
        except ServiceError as error:
            raise ValueError(error.message) from None
        digest = hashlib.sha256(f"{image.width}x{image.height}".encode() + image.tobytes()).digest()
        key = hashlib.sha256(digest + self._encoder.fingerprint).digest()
        with self._lock:
            found = self._cache.get(key)
            if found is None:
                found = self._encoder.encode(image)
                self._cache.put(key, found, len(found.embeddings))
        return key, found


def images_of(given: Any, what: str) -> "tuple[bytes | Image, ...]":
    """Returns the images in `multi_modal_data` (its item `image`).

    Raises ValueError for another kind of data, TypeError for an object that is neither a PIL image nor bytes.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a dict such as {{'image': PIL.Image}}")
    data = cast(Mapping[str, Any], given)
    for kind, value in data.items():
        if kind != "image" and value:
            raise ValueError(f"{what} has {kind!r}: only images are taken, under 'image'.")
    found: Any = data.get("image")
    images: Sequence[Any] = () if found is None else found if isinstance(found, list | tuple) else (found,)
    return tuple(_image(one, what) for one in images)


def without_pil(messages: Sequence[Mapping[str, Any]], images: "list[Image]") -> list[dict[str, Any]]:
    """Returns the messages with each `image_pil` part replaced by an `image_url` part with a number.

    The images are appended to `images`; `taker` resolves the numbers. Raises TypeError.
    """
    return [
        {**message, "content": [_numbered(part, images) for part in content]}
        if isinstance(content := message.get("content"), list | tuple)
        else dict(message)
        for message in messages
    ]


def taker(images: "Sequence[Image]", taken: "list[bytes | Image]", *, enabled: bool) -> TakeImage:
    """Returns a function that appends the images in messages from `without_pil` to `taken`.

    It refuses images unless the engine accepts them (`enabled`).
    """

    def take(given: ImageUrl | str | None, param: str) -> None:
        if not enabled:
            raise ServiceError("unsupported_parameter", f"'{param}': {NOT_ENABLED}.", param=param)
        url = given if isinstance(given, str) else (given and given.url) or ""
        number = url.removeprefix(_PIL_SCHEME)
        if number != url and number.isdecimal() and int(number) < len(images):
            taken.append(images[int(number)])
            return
        check_detail(given, f"{param}.detail")
        found: ImageInput = read_image_url(given, param)
        if found.url:
            text = f"'{param}': images are not fetched in this process: give a data URL, or a part of type image_pil."
            raise ServiceError("invalid_value", text, param=param)
        taken.append(found.file)

    return take


def _numbered(part: Any, images: "list[Image]") -> Any:
    if not isinstance(part, Mapping) or cast(Mapping[str, Any], part).get("type") != "image_pil":
        return part
    images.append(_image(cast(Mapping[str, Any], part).get("image_pil"), "a part of type 'image_pil'", files=False))
    return {"type": "image_url", "image_url": {"url": f"{_PIL_SCHEME}{len(images) - 1}"}}


def _image(given: Any, what: str, *, files: bool = True) -> Any:
    from PIL import Image

    if isinstance(given, Image.Image) or (files and isinstance(given, bytes)):
        return given
    kinds = "an image of PIL" + (" or the bytes of its file" if files else "")
    raise TypeError(f"{what} must have {kinds}, not {type(given).__name__}")
