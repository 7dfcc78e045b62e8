"""Reads the key file, and reads it again when it changes, so that keys change without a restart."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from antiphon.shared.flags import SettingsError
from antiphon.shared.security.api_keys import ApiKey, read_keys

log = logging.getLogger(__name__)
POLL_S = 1.0
"""Interval at which the file is checked for changes, seconds. A check is one system call."""
_Stamp = tuple[int, int, int]


class KeyFile:
    """The file that `--api-keys-file` names."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: _Stamp | None = None

    def read(self) -> list[ApiKey]:
        """Returns the keys of the file. Raises SettingsError, see `read_keys`."""
        with contextlib.suppress(OSError):  # `read_keys` says what is wrong
            self._stamp = self._look()
        return read_keys(self._path)

    async def watch(self, use: Callable[[Sequence[ApiKey]], None]) -> NoReturn:
        """Calls `use` with the keys each time the file has changed, without end.

        If the file is invalid or missing, the keys of the last valid file stay in use, and the reason is logged once
        for each change of the file.
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
