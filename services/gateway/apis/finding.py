"""Finds the APIs."""

import importlib.util
import pkgutil

from services.gateway import apis
from services.gateway.apis.openai.base import Api


def find_apis() -> list[Api]:
    """Returns the API of each folder that has a module `api`, in the order of their routes."""
    folders = [found.name for found in pkgutil.iter_modules(apis.__path__, f"{apis.__name__}.") if found.ispkg]
    found = [name for name in folders if importlib.util.find_spec(f"{name}.api") is not None]
    made: list[Api] = [importlib.import_module(f"{name}.api").TheApi() for name in found]
    return sorted(made, key=lambda one: one.order)
