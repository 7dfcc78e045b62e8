"""Keeps the files of images on the bus, once however many responses of an API key have them.

The images belong to finished responses, to responses in the background, and to streams. Their files are in the log of
finished responses and take part of its space. Each response writes its images again, so an image is dropped at about
the same time as the last response that has it. A file is named by its digest, and is stored in parts that any NATS
server takes.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.shared import limits
from antiphon.shared.deployment import stores


class KeptImage(msgspec.Struct, frozen=True, array_like=True):
    """Names a file: its SHA-256 in hexadecimal digits, and its number of bytes."""

    digest: str
    size: int


def kept_image(file: bytes) -> KeptImage:
    """Returns the name of a file."""
    return KeptImage(hashlib.sha256(file).hexdigest(), len(file))


class KeptImages:
    """The images in the log of responses, which is `part`. Methods raise LogUnavailableError.

    A file is kept once for each API key that has sent it, so that no key can drop the files of another one.
    """

    def __init__(self, logs: GatewayLogs) -> None:
        self.logs = logs
        self.subject = logs.host.subjects.response
        """Returns the subject of an entry of the log."""
        self.part = logs.part(stores.responses(logs.host.subjects, logs.storage))

    async def put(self, key: str, files: Mapping[KeptImage, bytes]) -> None:
        """Writes files of an API key. Returns when the bus has them.

        Raises ServiceError if the bus takes no message of this size.
        """
        parts = [
            (subject, file[number * limits.IMAGE_PART_BYTES : (number + 1) * limits.IMAGE_PART_BYTES])
            for name, file in files.items()
            for number, subject in enumerate(self.subjects(key, name))
        ]
        for first in range(0, len(parts), limits.IMAGE_READS_MAX):
            some = parts[first : first + limits.IMAGE_READS_MAX]
            await asyncio.gather(*(self.part.append(key, subject, part) for subject, part in some))

    async def get(self, key: str, names: Sequence[KeptImage]) -> dict[KeptImage, bytes]:
        """Returns the files of a key that are complete; files of which the log has dropped a part are left out."""
        found: dict[KeptImage, bytes] = {}
        for name in dict.fromkeys(names):
            file = await self._file(self.subjects(key, name))
            if kept_image(file) == name:
                found[name] = file
        return found

    def subjects(self, key: str, name: KeptImage) -> list[str]:
        """Returns the subjects of the parts of a file."""
        count = -(-name.size // limits.IMAGE_PART_BYTES)
        digest = hashlib.sha256(f"{key} {name.digest}".encode()).hexdigest()
        return [self.subject(f"image-{digest}-{number}") for number in range(count)]

    async def _file(self, subjects: list[str]) -> bytes:
        parts = list[bytes]()
        for first in range(0, len(subjects), limits.IMAGE_READS_MAX):
            some = await asyncio.gather(*map(self.part.log.last, subjects[first : first + limits.IMAGE_READS_MAX]))
            parts += [each.payload if each else b"" for each in some]
        return b"".join(parts)
