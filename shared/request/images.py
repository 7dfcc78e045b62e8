"""Reads the images of a request (`image_url` parts of messages) and inserts their tokens into its prompt.

Every API gives its images to the conversation as `image_url` parts, so they all have these checks. Pure: nothing is
fetched or decoded as an image.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from antiphon.shared import limits
from antiphon.shared.codec import TOKEN_BYTES, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ImageEncoded, ImageTokens
from antiphon.shared.request.checks import missing, refuse, unsupported

MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_BASE64, _DATA = ";base64", "data:"


class ImageUrl(msgspec.Struct, kw_only=True):
    """The source of an image: a data URL with its file, or a URL to download it from."""

    url: str | None = None
    detail: str | None = None
    """Has no effect: the size of images is a setting of the server. Whoever reads a request tells of it."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a request: its file, or the `url` to fetch it from, or both if it was fetched.

    `param`: its name in the request, for errors.
    """

    param: str
    file: bytes = b""
    url: str = ""


def read_image_url(given: ImageUrl | str | None, param: str) -> ImageInput:
    """Returns the image of an `image_url` field. Raises ServiceError that names `param`."""
    if given is None:
        missing(param)
    asked = ImageUrl(url=given) if isinstance(given, str) else given
    if not asked.url:
        missing(f"{param}.url")
    if is_data_url(asked.url):
        return ImageInput(param, file=_file_of(asked.url, param))
    if asked.url.partition(":")[0].lower() in ("http", "https"):
        return ImageInput(param, url=asked.url)
    refuse(param, "must be a data URL with an image, or begin with https:// or http://")


def check_detail(given: ImageUrl | str | None, param: str) -> None:
    """Raises ServiceError for a `detail` other than "auto". For callers that cannot tell that it has no effect."""
    if isinstance(given, ImageUrl) and given.detail not in (None, "auto"):
        unsupported(param, f"The size is that of --mm-processor-kwargs; the detail '{given.detail}' is")


def is_data_url(url: ImageUrl | str | None) -> bool:
    """Whether an image comes with its request, and is not fetched."""
    return isinstance(url, str) and url[: len(_DATA)].lower() == _DATA


TakeImage = Callable[[ImageUrl | str | None, str], None]
"""Takes the `image_url` field of a part of a message, and its name for errors. Raises ServiceError."""


def taken_into(images: list[ImageInput]) -> TakeImage:
    """Returns a `TakeImage` that collects the images of a conversation in a list, in order."""
    return lambda given, param: images.append(read_image_url(given, param))


def check_images(images: list[ImageInput], number_max: int = limits.IMAGES_MAX) -> None:
    """Raises ServiceError for more than `number_max` images in a request, or too many bytes of them."""
    if len(images) > number_max:
        message = f"A request has at most {number_max} images on this server, and this one has {len(images)}."
        raise ServiceError("invalid_value", message, param=images[number_max].param)
    if sum(len(image.file) for image in images) > limits.IMAGES_BYTES_MAX:
        message = f"All images together have more than {limits.IMAGES_BYTES_MAX} bytes."
        raise ServiceError("request_too_large", message, param=images[-1].param)


def check_file_size(size: int, param: str) -> None:
    """Raises ServiceError for the file of an image that is empty or too large."""
    if not size:
        refuse(param, "has no bytes")
    if size > limits.IMAGE_BYTES_MAX:
        message = f"The image of '{param}' has more than {limits.IMAGE_BYTES_MAX} bytes. Make it smaller."
        raise ServiceError("request_too_large", message, param=param)


def with_image_texts(text: str, images: Sequence[ImageTokens]) -> str:
    """Returns the text of a prompt with each image's placeholder replaced by the text that the model expects there.

    The text is changed before tokenization, because line breaks at the ends of the inserted text may merge with
    adjacent ones into one token. Raises ServiceError if the prompt does not have one place for each image.
    """
    if not images[0].place:
        return text
    between = text.split(images[0].place)
    _check_places(len(between) - 1, len(images))
    parts = [behind for image, part in zip(images, between[1:], strict=True) for behind in (image.text, part)]
    return "".join((between[0], *parts))


def _check_places(num_places: int, num_images: int) -> None:
    if num_places != num_images:
        raise ServiceError(
            "invalid_value",
            f"The prompt has {num_places} places for {num_images} images. Leave the model's own token for "
            "images out of texts; if the texts have none, the chat template does not write it.",
            param="messages",
        )


def with_images(token_ids: list[int], images: Sequence[ImageTokens]) -> tuple[list[int], tuple[int, ...]]:
    """Returns a prompt with each image token replaced by the image's tokens, and the start index of each image.

    Raises ServiceError if the prompt does not have one such token for each image.
    """
    stands_for = images[0].token_id
    places = [place for place, token in enumerate(token_ids) if token == stands_for]
    _check_places(len(places), len(images))
    found, starts, done = list[int](), list[int](), 0
    for place, image in zip(places, images, strict=True):
        found += token_ids[done:place]
        starts.append(len(found))
        found += unpack_ids(image.layout) if image.layout else [stands_for] * image.num_tokens
        done = place + 1
    return found + token_ids[done:], tuple(starts)


def num_image_tokens(image: ImageEncoded) -> int:
    """Returns the number of tokens of an image in a prompt, including tokens without an embedding of the image."""
    return len(image.layout) // TOKEN_BYTES or image.rows * image.columns


def plain_places(layout: bytes, token_id: int) -> tuple[int, ...]:
    """Returns the indices in `ImageTokens.layout` of tokens other than `token_id`."""
    return tuple(place for place, token in enumerate(unpack_ids(layout)) if token != token_id)


def _file_of(url: str, param: str) -> bytes:
    head, comma, text = url[len(_DATA) :].partition(",")
    media_type = head.lower().removesuffix(_BASE64)
    if not comma or not head.lower().endswith(_BASE64):
        refuse(param, "must be a data URL in base64, such as data:image/png;base64,…")
    if media_type not in MEDIA_TYPES:
        refuse(param, f"must have one of the types {', '.join(MEDIA_TYPES)}")
    check_file_size(len(text) * 3 // 4 - 2, param)
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        refuse(param, "has no image: its base64 is damaged")
    check_file_size(len(file), param)
    return file
