"""Keeps the files of pictures on the bus, once however many responses have them.

The pictures belong to finished responses, to responses in the background, and to streams. Their files are in the log of
finished responses and take part of its space. Each response writes its pictures again, so a picture is dropped at about
the same time as the last response that has it. A file is named by its digest, and is stored in parts that any NATS
server takes.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from shared import limits
from shared.actors.host import Host
from shared.bus.durable_log import DurableLog, LogConfig, Storage
from shared.subjects import bucket_name


class KeptPicture(msgspec.Struct, frozen=True, array_like=True):
    """Names a file: its SHA-256 in hexadecimal digits, and its number of bytes."""

    digest: str
    size: int


def kept_picture(file: bytes) -> KeptPicture:
    """Returns the name of a file."""
    return KeptPicture(hashlib.sha256(file).hexdigest(), len(file))


def responses_log(host: Host, storage: Storage) -> DurableLog:
    """Returns the log of finished responses and their pictures."""
    config = LogConfig(
        name=bucket_name(host.subjects.namespace, "responses"),
        subject=host.subjects.response("*"),
        storage=storage,
        max_age_s=limits.RESPONSE_TTL_S,
        max_bytes=limits.RESPONSES_BYTES_MAX,
        per_subject=1,
    )
    return host.transport.durable_log(config, timeout_s=limits.STREAM_STORE_TIMEOUT_S)


class KeptPictures:
    """The pictures in the log of responses. Methods raise LogUnavailableError."""

    def __init__(self, host: Host, storage: Storage) -> None:
        self._log, self._subject = responses_log(host, storage), host.subjects.response

    async def put(self, files: Mapping[KeptPicture, bytes]) -> None:
        """Writes files. Returns when the bus has them. Raises ServiceError if the bus takes no message of this size."""
        if files:
            await self._log.open()
        parts = [
            (subject, file[number * limits.IMAGE_PART_BYTES : (number + 1) * limits.IMAGE_PART_BYTES])
            for name, file in files.items()
            for number, subject in enumerate(self._subjects(name))
        ]
        for first in range(0, len(parts), limits.IMAGE_READS_MAX):
            some = parts[first : first + limits.IMAGE_READS_MAX]
            await asyncio.gather(*(self._log.append(subject, part) for subject, part in some))

    async def get(self, names: Sequence[KeptPicture]) -> dict[KeptPicture, bytes]:
        """Returns the files that are complete; files of which the log has dropped a part are left out."""
        found: dict[KeptPicture, bytes] = {}
        if names:
            await self._log.open()
        for name in dict.fromkeys(names):
            file = await self._file(name)
            if kept_picture(file) == name:
                found[name] = file
        return found

    async def _file(self, name: KeptPicture) -> bytes:
        subjects, parts = self._subjects(name), list[bytes]()
        for first in range(0, len(subjects), limits.IMAGE_READS_MAX):
            some = await asyncio.gather(*map(self._log.last, subjects[first : first + limits.IMAGE_READS_MAX]))
            parts += [each.payload if each else b"" for each in some]
        return b"".join(parts)

    def _subjects(self, name: KeptPicture) -> list[str]:
        count = -(-name.size // limits.IMAGE_PART_BYTES)
        return [self._subject(f"picture-{name.digest}-{number}") for number in range(count)]
