"""Imports: without garbage collections in between, and of what other packages add (plug-ins)."""

import contextlib
import gc
from collections.abc import Generator
from typing import Any

from antiphon.shared.flags import SettingsError


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


def plug_ins(group: str) -> list[Any]:
    """Imports what installed packages name in the entry points `antiphon.<group>`, in the order of their names.

    Raises SettingsError that names the plug-in and its package: a server without it would not be what was asked for.
    """
    # Imported here because launchers and tokenizers have no plug-ins.
    from importlib.metadata import entry_points

    found: list[Any] = []
    for entry in sorted(entry_points(group=f"antiphon.{group}"), key=lambda one: one.name):
        try:
            found.append(entry.load())
        except Exception as error:  # code of others
            package = entry.dist.name if entry.dist is not None else "an unknown package"
            raise SettingsError(f"the plug-in {entry.name} of {package} cannot be loaded: {error!r}") from error
    return found
