"""Small JSON files in a directory, one for each object: the descriptions of files, the records of batches."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)
D = TypeVar("D")
SUFFIX = ".json"


class Records(Generic[D]):
    """The files `ID.json` in a directory, decoded. They are written elsewhere, also by other gateways."""

    def __init__(
        self, directory: Callable[[], Path], decoder: "msgspec.json.Decoder[D]", is_final: Callable[[D], bool]
    ) -> None:
        """`is_final`: whether a record does not change any more, so that `all` need not read it again."""
        self._directory, self._decoder, self._is_final = directory, decoder, is_final
        self._final: dict[str, D] = {}
        self._damaged = set[str]()
        """Files whose damage is logged already."""

    def path(self, record_id: str) -> Path:
        """Returns the path of a record."""
        return self._directory() / f"{record_id}{SUFFIX}"

    def read(self, record_id: str) -> D | None:
        """Returns a record as it is on the disk; None if it is missing or damaged. A damaged one is logged once."""
        path = self.path(record_id)
        try:
            return self._decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if record_id not in self._damaged:
                self._damaged.add(record_id)
                log.error("%s is damaged and is passed over: %s", path, error)
            return None

    def all(self, names: Iterable[str]) -> dict[str, D]:
        """Returns the records among the files of the directory, by id. The caller must not change them."""
        ids = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        known = self._final
        read = {one: known.get(one) or self.read(one) for one in ids}
        found = {one: record for one, record in read.items() if record is not None}
        self._final = {one: record for one, record in found.items() if self._is_final(record)}
        return found
