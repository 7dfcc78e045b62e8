"""Has the images of a request encoded by an image service, before the prompt is tokenized."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.path.service_clients import ServiceClients
from shared import limits
from shared.errors import ServiceError
from shared.messages import EncodePicture, PictureEncoded, PictureFile, PictureTokens, PromptPicture
from shared.request.pictures import PictureInput, num_picture_tokens

_OF_THE_PICTURE = ("invalid_value", "request_too_large")


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """An image of a request: its file, which this gateway stores, and the number of its tokens."""

    file: PictureFile
    encoded: PictureEncoded

    @property
    def tokens(self) -> PictureTokens:
        """The description of the image for tokenizers."""
        encoded = self.encoded
        num_tokens = num_picture_tokens(encoded)
        return PictureTokens(
            token_id=encoded.token_id,
            num_tokens=num_tokens,
            key=encoded.key,
            place=encoded.place,
            text=encoded.text,
            layout=encoded.layout,
        )

    def placed(self, start: int) -> PromptPicture:
        """Returns the description of the image for the engine. `start`: position of its first token in the prompt."""
        return PromptPicture(start, self.encoded, self.file)


async def encoded(
    clients: ServiceClients, model: str, pictures: Sequence[PictureInput], files: Sequence[PictureFile], client: str
) -> tuple[RequestPicture, ...]:
    """Returns the pictures of a request, encoded. `client`: the name of the client that it comes from.

    Raises ServiceError that names an invalid image, or the one with which they have too many pixels.
    """
    places, num_pixels = asyncio.Semaphore(limits.IMAGES_AT_ONCE), 0

    async def one(picture: PictureInput, file: PictureFile) -> RequestPicture:
        nonlocal num_pixels
        try:
            async with places:
                found = await clients.picture(EncodePicture(model, file, client))
        except ServiceError as error:
            if error.code not in _OF_THE_PICTURE:
                raise
            told = error.message.replace("The picture", f"The picture of '{picture.param}'", 1)
            raise ServiceError(error.code, told, param=picture.param) from None
        num_pixels += found.num_pixels
        if num_pixels > limits.IMAGES_PIXELS_MAX:
            message = f"All pictures together have more than {limits.IMAGES_PIXELS_MAX} pixels. Make them smaller."
            raise ServiceError("invalid_value", message, param=picture.param)
        return RequestPicture(file, found)

    tasks = [asyncio.create_task(one(*pair)) for pair in zip(pictures, files, strict=True)]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
