"""Imports without garbage collections in between."""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def without_collections() -> Generator[None]:
    """Context manager for imports. The imported objects are excluded from later collections.

    Imported objects stay alive, so collections during an import would find nothing to free. They would take a tenth of
    the import's time, and collections after the import would examine the same objects again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
