"""Reads the key file, and reads it again when it changes, so that keys change without a restart."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from services.gateway.access.keys import ApiKey, keys_of_file
from shared.flags import SettingsError

log = logging.getLogger(__name__)
POLL_S = 1.0
"""Interval at which the file is looked at, seconds. A look is one system call."""
_Stamp = tuple[int, int, int]


class KeyFile:
    """The file that `--api-keys-file` names. TOML, or JSON if its name ends in `.json`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: _Stamp | None = None

    def read(self) -> list[ApiKey]:
        """Returns the keys of the file. Raises SettingsError if it cannot be read or is not a valid key file."""
        source = f"--api-keys-file: {self._path}"
        try:
            self._stamp = self._look()
            text = self._path.read_text(encoding="utf-8")
            open_to_others = self._path.stat().st_mode & 0o077
        except OSError as error:
            raise SettingsError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{source} is not a text in UTF-8") from error
        if open_to_others:
            log.warning("%s can be read by other users of this machine", self._path)
        return keys_of_file(text, is_json=self._path.suffix == ".json", source=source)

    async def watch(self, use: Callable[[Sequence[ApiKey]], None]) -> NoReturn:
        """Calls `use` with the keys each time the file has changed, without end.

        A file that is invalid or missing changes nothing: the keys of the last valid file stay in use, and the reason
        is logged once for each change.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if not self._has_changed():
                continue
            try:
                keys = self.read()
                use(keys)
            except SettingsError as error:
                log.error("%s; the keys read before stay in use", error)
            else:
                log.info("%s has changed: it lists %d keys", self._path, len(keys))

    def _has_changed(self) -> bool:
        try:
            stamp = self._look()
        except OSError:
            stamp = None
        changed, self._stamp = stamp != self._stamp, stamp
        return changed

    def _look(self) -> _Stamp:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size
