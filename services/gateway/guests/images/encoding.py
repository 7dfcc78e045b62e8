"""Has the images of a request encoded by an image service, before the prompt is tokenized."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EncodeImage, ImageEncoded, ImageFile, ImageTokens, PromptImage
from antiphon.shared.request.images import ImageInput, num_image_tokens

_OF_THE_IMAGE = ("invalid_value", "request_too_large")


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An image of a request: its file, which this gateway stores, and the number of its tokens."""

    file: ImageFile
    encoded: ImageEncoded

    @property
    def tokens(self) -> ImageTokens:
        """The description of the image for tokenizers."""
        encoded = self.encoded
        num_tokens = num_image_tokens(encoded)
        return ImageTokens(
            token_id=encoded.token_id,
            num_tokens=num_tokens,
            key=encoded.key,
            place=encoded.place,
            text=encoded.text,
            layout=encoded.layout,
        )

    def placed(self, start: int) -> PromptImage:
        """Returns the description of the image for the engine. `start`: position of its first token in the prompt."""
        return PromptImage(start, self.encoded, self.file)


async def encoded(
    clients: ServiceClients, model: str, images: Sequence[ImageInput], files: Sequence[ImageFile], client: str
) -> tuple[RequestImage, ...]:
    """Returns the images of a request, encoded. `client`: the name of the client that it comes from.

    Raises ServiceError that names an invalid image, or the one with which they have too many pixels.
    """
    places, num_pixels = asyncio.Semaphore(limits.IMAGES_AT_ONCE), 0

    async def one(image: ImageInput, file: ImageFile) -> RequestImage:
        nonlocal num_pixels
        try:
            async with places:
                found = await clients.image(EncodeImage(model, file, client))
        except ServiceError as error:
            if error.code not in _OF_THE_IMAGE:
                raise
            told = error.message.replace("The image", f"The image of '{image.param}'", 1)
            raise ServiceError(error.code, told, param=image.param) from None
        num_pixels += found.num_pixels
        if num_pixels > limits.IMAGES_PIXELS_MAX:
            message = f"All images together have more than {limits.IMAGES_PIXELS_MAX} pixels. Make them smaller."
            raise ServiceError("invalid_value", message, param=image.param)
        return RequestImage(file, found)

    tasks = [asyncio.create_task(one(*pair)) for pair in zip(images, files, strict=True)]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
