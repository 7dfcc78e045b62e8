"""Has the images of a request encoded by an image service, before the prompt is tokenized."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.requests.service_clients import ServiceClients
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
        return PictureTokens(encoded.token_id, num_tokens, encoded.key, encoded.place, encoded.text, encoded.layout)

    def placed(self, start: int) -> PromptPicture:
        """Returns the description of the image for the engine. `start`: position of its first token in the prompt."""
        return PromptPicture(start, self.encoded, self.file)


async def encoded(
    clients: ServiceClients, model: str, pictures: Sequence[PictureInput], files: Sequence[PictureFile]
) -> tuple[RequestPicture, ...]:
    """Returns the pictures, encoded. Raises ServiceError that names an invalid image."""

    async def one(picture: PictureInput, file: PictureFile) -> RequestPicture:
        try:
            return RequestPicture(file, await clients.picture(EncodePicture(model, file)))
        except ServiceError as error:
            if error.code not in _OF_THE_PICTURE:
                raise
            told = error.message.replace("The picture", f"The picture of '{picture.param}'", 1)
            raise ServiceError(error.code, told, param=picture.param) from None

    return tuple(await asyncio.gather(*map(one, pictures, files)))
