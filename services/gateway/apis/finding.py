"""Finds the APIs and guests: modules of a certain name in the folders of a room, none of which names the folders.

Installed packages add theirs by entry points of the groups `antiphon.apis` and `antiphon.guests`, each of which names a
package with such a module.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.shared.actors.imports import plug_ins


def find_apis(*rooms: ModuleType) -> list[Api]:
    """Returns the API of each folder with a module `api`, in the order of routes: by `Api.order`, then by room."""
    made: list[Api] = [module.TheApi() for room in rooms for module in modules(room, "api")]
    return sorted(made, key=lambda one: one.order)


def modules(room: ModuleType, name: str) -> Iterator[ModuleType]:
    """Yields the modules of this name, one of each folder in a room that has it.

    A folder that cannot do without others has their names in `NEEDS`. It comes after them, and not at all if one is not
    there. Those that it needs need none themselves.
    """
    folders = [found.name for found in pkgutil.iter_modules(room.__path__) if found.ispkg]
    packages = [importlib.import_module(f"{room.__name__}.{folder}") for folder in folders]
    needs: dict[str, tuple[str, ...]] = {one.__name__: getattr(one, "NEEDS", ()) for one in packages}
    for package in sorted(needs, key=lambda one: bool(needs[one])):
        if set(folders).issuperset(needs[package]) and importlib.util.find_spec(f"{package}.{name}") is not None:
            yield importlib.import_module(f"{package}.{name}")
    for added in plug_ins(room.__name__.rpartition(".")[2]):
        if importlib.util.find_spec(f"{added.__name__}.{name}") is not None:
            yield importlib.import_module(f"{added.__name__}.{name}")
