"""Reads the file of a picture that a client has sent. Nothing in it is trusted.

The format is taken from the file's own bytes. The header is read first, so that a picture with too many pixels is
refused before anything is decoded. Of an animation the first frame is taken.
"""

import io

from PIL import Image, ImageOps

from shared import limits
from shared.errors import ServiceError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
ASPECT_MAX = 200
"""Largest ratio of the sides that the models' processors take."""
Image.MAX_IMAGE_PIXELS = limits.IMAGE_PIXELS_MAX


def open_picture(file: bytes) -> Image.Image:
    """Returns the picture, decoded, with three colours. Raises ServiceError for a file that is no such picture."""
    try:
        picture = Image.open(io.BytesIO(file), formats=FORMATS)
    except Exception as error:  # exceptions for damaged or hostile files have no common base class
        raise _refusal(f"is not a picture in one of the formats {', '.join(FORMATS)}") from error
    return checked_picture(picture)


def checked_picture(picture: Image.Image) -> Image.Image:
    """Returns a picture upright, decoded, with three colours. Raises ServiceError for one that is not taken."""
    width, height = picture.size
    if not width or not height:
        raise _refusal("has no pixels")
    if width * height > limits.IMAGE_PIXELS_MAX:
        raise _refusal(f"has {width} x {height} pixels; at most {limits.IMAGE_PIXELS_MAX} are taken. Make it smaller")
    if max(width, height) > ASPECT_MAX * min(width, height):
        raise _refusal(f"has {width} x {height} pixels: one side is more than {ASPECT_MAX} times the other")
    try:
        picture.load()
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:
        raise _refusal("is damaged: it cannot be decoded to the end") from error


def _refusal(told: str) -> ServiceError:
    return ServiceError("invalid_value", f"The picture {told}.")
