"""The image files of running requests. Image services read them from the gateway.

A file is kept, once for all requests that have it, until the last of them ends, because an engine that takes over a
sequence may need the image to be encoded again.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from antiphon.services.gateway.guests.images.remote import RemoteImages
from antiphon.shared import limits
from antiphon.shared.actors.image_parts import part_of
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ImageFile, ImagePart, ReadImage
from antiphon.shared.request.images import ImageInput, check_file_size, check_images

RETRY_AFTER_S = 2.0
FETCHES_AT_ONCE = 16


@dataclass(slots=True)
class _Kept:
    file: bytes
    uses: int = 0


class ImageStore:
    """The image files of one gateway. `source`: the subject on which image services read them."""

    def __init__(self, remote: RemoteImages, source: str, bytes_max: int = limits.GATEWAY_IMAGE_BYTES_MAX) -> None:
        self._remote, self._source, self._bytes_max = remote, source, bytes_max
        self._kept: dict[bytes, _Kept] = {}
        self._threads = ThreadPoolExecutor(FETCHES_AT_ONCE, "images")
        self.num_bytes = 0

    async def fetched(self, images: Sequence[ImageInput]) -> list[ImageInput]:
        """Returns the images; downloads the files of those given by URL. Raises ServiceError."""
        loop = asyncio.get_running_loop()

        async def one(image: ImageInput) -> ImageInput:
            if not image.url or image.file:
                return image
            file = await loop.run_in_executor(self._threads, self._remote.fetch, image.url, image.param)
            check_file_size(len(file), image.param)
            return replace(image, file=file)

        found: list[ImageInput] = []
        for first in range(0, len(images), limits.IMAGE_READS_MAX):
            found += await asyncio.gather(*map(one, images[first : first + limits.IMAGE_READS_MAX]))
            check_images(found)
        return found

    def hold(self, images: Sequence[ImageInput]) -> list[ImageFile]:
        """Keeps the files until `release`. Raises ServiceError if the gateway has too many."""
        names = [hashlib.sha256(image.file).digest() for image in images]
        new = {name: len(one.file) for name, one in zip(names, images, strict=True) if name not in self._kept}
        if self.num_bytes + sum(new.values()) > self._bytes_max:
            message = "The server has too many images. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=RETRY_AFTER_S)
        for name, image in zip(names, images, strict=True):
            kept = self._kept.setdefault(name, _Kept(image.file))
            kept.uses += 1
        self.num_bytes += sum(new.values())
        return [ImageFile(name, len(image.file), self._source) for name, image in zip(names, images, strict=True)]

    def release(self, files: Sequence[ImageFile]) -> None:
        """Drops files that `hold` has returned, unless another request has them too."""
        for file in files:
            kept = self._kept[file.digest]
            kept.uses -= 1
            if not kept.uses:
                del self._kept[file.digest]
                self.num_bytes -= file.size

    def part(self, message: ReadImage) -> ImagePart:
        """Returns a part of a file. Raises ServiceError('not_found') if no running request has it."""
        kept = self._kept.get(message.digest)
        if kept is None:
            raise ServiceError("not_found", "No running request has this image.")
        return part_of(kept.file, message.offset)

    def close(self) -> None:
        """Ends the download threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
