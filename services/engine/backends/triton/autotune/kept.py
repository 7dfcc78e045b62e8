"""What was measured on this GPU, kept for later starts: a JSON file in a directory that only this user writes.

    {"measured with": "…", "products": {"bfloat16 6144 x 4096": {"8": {"skinny": 0.012, "library": 0.015}}}}

Milliseconds by product, rows and form; a form that failed or was wrong has null. A file belongs to one kind of GPU,
driver, versions of the libraries and of the engine's sources; others have files of their own.
"""

import hashlib
import json
import logging
import tempfile
from pathlib import Path

import torch

from antiphon.services.engine.worker.configuration import hardware, software_version
from antiphon.shared.cache_dirs import is_private, is_usable, remove_oldest, user_directory

logger = logging.getLogger(__name__)

Times = dict[str, float | None]
"""Milliseconds by the name of the form; None: it failed or was wrong."""
Measured = dict[str, dict[int, Times]]
"""By the name of the product and the number of rows."""

_USUAL_DIRECTORY = "~/.cache/antiphon/gpu-kernels"
_DRIVER = Path("/proc/driver/nvidia/version")
_FILES_MAX = 16


def measured_with(device: torch.device) -> str:
    """Returns what the times depend on besides the product."""
    driver = _DRIVER.read_text(encoding="utf-8").splitlines()[0] if _DRIVER.is_file() else "no driver"
    return f"{hardware(device)}; {driver}; {software_version()}"


class Kept:
    """The file for what was `measured_with`, in the directory `asked` or the user's usual one."""

    def __init__(self, asked: str, measured_with: str) -> None:
        directory = user_directory(asked, _USUAL_DIRECTORY)
        if directory is None or not is_usable(directory):
            logger.warning(
                "what is measured here is not kept: %s is no private directory that can be written", directory
            )
            directory = None
        self._measured_with = measured_with
        name = hashlib.sha256(measured_with.encode()).hexdigest()[:16]
        self.path = None if directory is None else directory / f"{name}.json"

    def read(self) -> Measured:
        """Returns what the file has; nothing if there is none, or one that another user could have written."""
        if self.path is None or not self.path.is_file() or not is_private(self.path):
            return {}
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))["products"]
            return {name: {int(rows): dict(times) for rows, times in by.items()} for name, by in told.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read, so products are measured again: %r", self.path, error)
            return {}

    def write(self, measured: Measured) -> None:
        """Writes the file anew, whole."""
        if self.path is None:
            return
        text = json.dumps({"measured with": self._measured_with, "products": measured}, indent=1)
        try:
            # Engines that start together write one after the other, each a whole file.
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.path.parent) as scratch:
                (Path(scratch) / self.path.name).write_text(text + "\n", encoding="utf-8")
                (Path(scratch) / self.path.name).replace(self.path)
            remove_oldest(self.path.parent, "*.json", _FILES_MAX)
        except OSError as error:
            logger.warning("what was measured is not kept: %s", error)
