"""Reads an image file from a client. Nothing in the file is trusted.

The format is taken from the file's own bytes. The header is read first, so that an image with too many pixels is
refused before decoding. A large JPEG is decoded at half its size, in a fraction of the time and memory. Of an animation
only the first frame is used.
"""

import io

from PIL import Image, ImageOps

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
ASPECT_MAX = 200
"""Largest aspect ratio that the models' processors accept."""
Image.MAX_IMAGE_PIXELS = limits.IMAGE_JPEG_PIXELS_MAX


def open_image(file: bytes) -> Image.Image:
    """Returns the decoded RGB image in a file. Raises ServiceError for an invalid file."""
    try:
        image = Image.open(io.BytesIO(file), formats=FORMATS)
    except Exception as error:  # the exceptions for damaged or hostile files have no common base class
        raise _refusal(f"is not an image in one of the formats {', '.join(FORMATS)}") from error
    width, height = image.size
    if limits.IMAGE_PIXELS_MAX < width * height <= limits.IMAGE_JPEG_PIXELS_MAX:
        image.draft(None, (width // 2, height // 2))  # has an effect on JPEG only
    return checked_image(image)


def checked_image(image: Image.Image) -> Image.Image:
    """Returns a decoded, upright RGB image. Raises ServiceError for an unsupported image."""
    width, height = image.size
    if not width or not height:
        raise _refusal("has no pixels")
    if width * height > limits.IMAGE_PIXELS_MAX:
        most = limits.IMAGE_JPEG_PIXELS_MAX if image.format == "JPEG" else limits.IMAGE_PIXELS_MAX
        raise _refusal(f"has {width} x {height} pixels; at most {most} are taken. Make it smaller")
    if max(width, height) > ASPECT_MAX * min(width, height):
        raise _refusal(f"has {width} x {height} pixels: one side is more than {ASPECT_MAX} times the other")
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise _refusal("is damaged: it cannot be decoded to the end") from error


def _refusal(told: str) -> ServiceError:
    return ServiceError("invalid_value", f"The image {told}.")
