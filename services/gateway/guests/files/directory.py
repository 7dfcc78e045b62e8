"""The files in a directory, which several gateways may share, and the room that is left there. All functions block.

A stored file consists of two files: `ID` has the data, `ID.json` the description. While it is being written, the data
is in `ID.KEY.part`, where KEY is the name of the API key that writes it. `ID.json` is written last; from then on
clients see the file. Only the operating system's user that runs the gateways can read the files.
"""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from antiphon.services.gateway.edge.access.call import is_id
from antiphon.services.gateway.guests.files import temporary
from antiphon.services.gateway.guests.files.clock import WallClock
from antiphon.services.gateway.guests.files.records import SUFFIX, Records
from antiphon.shared.actors.fair_work import leaves_room
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits
from antiphon.shared.security.api_keys import ANONYMOUS

ID_PREFIX = "file-"
_PART = "part"
_DIRECTORY_MODE = 0o700


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file. Times are in Unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None
    owner: str = ANONYMOUS.name
    """Name of the API key that created the file. Not shown."""

    def to_object(self) -> dict[str, Any]:
        """Returns the description as OpenAI's API shows it."""
        shown = msgspec.to_builtins(self)
        del shown["owner"]
        return shown


class FileDirectory:
    """The files of all keys in one directory."""

    def __init__(self, given: str, clock: WallClock) -> None:
        """`given`: made when it is first used; "": a temporary directory, deleted at the end of the process."""
        self.clock = clock
        self.taking_room = threading.Lock()
        """Held from `check_room` until the room is taken. Each gateway has its own, so that none waits for another one
        that stands still: together they may exceed the limits by one file each."""
        self._given = given
        self._path: Path | None = None
        self._making = threading.Lock()
        self._descriptions = Records(lambda: self.path, msgspec.json.Decoder(StoredFile), lambda _: True)

    @property
    def path(self) -> Path:
        """The directory. Made at the first call; raises ServiceError if it cannot be made."""
        with self._making:
            if self._path is None:
                self._path = self._make()
            return self._path

    def data(self, file_id: str) -> Path:
        """Returns the path of a complete file's data."""
        return self.path / file_id

    def part(self, file_id: str, owner: str) -> Path:
        """Returns the path of the data of a file that a key is writing."""
        return self.path / f"{file_id}.{owner}.{_PART}"

    def description(self, file_id: str) -> Path:
        """Returns the path of a file's description."""
        return self._descriptions.path(file_id)

    def names(self, prefix: str) -> set[str]:
        """Returns the names in the directory that begin with `prefix`."""
        everything = os.listdir(self.path)  # noqa: PTH208 - to make a path for each name takes several times as long
        return {name for name in everything if name.startswith(prefix)}

    def get(self, file_id: str) -> StoredFile | None:
        """Returns the description of a file; None if there is no such file."""
        if not (file_id.startswith(ID_PREFIX) and is_id(file_id.removeprefix(ID_PREFIX))):
            return None
        found = self._descriptions.read(file_id)
        return None if found is None or found.expires_at <= self.clock.now() else found

    def all(self) -> list[StoredFile]:
        """Returns the descriptions of all files, the oldest first."""
        now = self.clock.now()
        found = [one for one in self._described(self.names(ID_PREFIX)) if now < one.expires_at]
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def delete(self, file_id: str) -> None:
        """Removes a file, if it is there."""
        for path in (self.description(file_id), self.data(file_id)):
            path.unlink(missing_ok=True)

    def check_room(self, owner: str, file_id: str, num_bytes: int) -> None:
        """Raises ServiceError('request_too_large') if there is no room for a file of this size of this key.

        `file_id`: the file, which may be there already, with another size; "": some new file.
        """
        counts, sizes = Counter[str](), Counter[str]()
        growth, is_new = num_bytes, 1
        for one, key, size in self._held():
            counts[key] += 1
            sizes[key] += size
            if one == file_id:
                growth, is_new = num_bytes - size, 0
        room = sizes.total() + shutil.disk_usage(self.path).free - file_limits.FILES_FREE_BYTES
        most_bytes = min(file_limits.FILES_BYTES_MAX, room)
        if not (
            leaves_room(owner, counts[owner] + is_new, counts.total() + is_new, file_limits.FILES_MAX)
            and leaves_room(owner, sizes[owner] + growth, sizes.total() + growth, most_bytes)
        ):
            message = "There is no room for this file. Delete files that are not needed."
            raise ServiceError("request_too_large", message, param="file")

    def _held(self) -> Iterator[tuple[str, str, int]]:
        """Yields the id, the key and the size of each file, complete or not. Removes abandoned ones."""
        names = self.names(ID_PREFIX)
        described = {one.id: one for one in self._described(names)}
        for one in described.values():
            yield one.id, one.owner, one.bytes
        for name in names.difference(described):
            if not name.endswith(SUFFIX):
                file_id, *rest = name.split(".")
                size = self._size(self.path / name, f"{file_id}{SUFFIX}" in names)
                if size is not None:
                    yield file_id, rest[0] if len(rest) == 2 else "", size

    def _size(self, path: Path, is_described: bool) -> int | None:
        """Returns the size of data that clients do not see; None if it is not there any more.

        Removes it if nobody has written to it for long: its process ended before the file was complete or described.
        """
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        if not is_described and found.st_mtime + file_limits.FILE_ABANDONED_S <= self.clock.certain():
            path.unlink(missing_ok=True)
            return None
        return found.st_size

    def _described(self, names: set[str]) -> Iterator[StoredFile]:
        """Yields the descriptions among some names. Deletes files that have certainly expired."""
        certain = self.clock.certain()
        for one in self._descriptions.all(names).values():
            if one.expires_at <= certain:
                self.delete(one.id)
            else:
                yield one

    def _make(self) -> Path:
        try:
            if not self._given:
                return temporary.make()
            path = Path(self._given)
            path.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
            return path
        except OSError as error:
            message = "The server's directory for files cannot be used: set it with --files-directory."
            raise ServiceError("internal_error", message) from error
