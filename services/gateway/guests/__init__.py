"""What a request may use besides its path, a folder for each; the path does not know their names (`path.guest`)."""

import importlib.util
import pkgutil

from services.gateway.path.actor import GatewayActor
from services.gateway.path.guest import Guest
from shared.config import GatewaySettings


def make_guests(gateway: GatewayActor, settings: GatewaySettings) -> list[Guest]:
    """Returns the guests of a gateway: one of each folder here that has a module `guest` with a function `make`."""
    found: list[Guest] = []
    for folder in pkgutil.iter_modules(__path__, f"{__name__}."):
        if importlib.util.find_spec(f"{folder.name}.guest") is not None:
            guest: Guest = importlib.import_module(f"{folder.name}.guest").make(gateway, settings)
            found.append(guest)
    return found
