"""What a request may use besides its path, a folder for each; the path does not know their names (`path.guest`)."""

import sys

from antiphon.services.gateway.apis.finding import modules
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared.config import GatewaySettings


def make_guests(gateway: GatewayActor, settings: GatewaySettings) -> None:
    """Adds its guests to a gateway: what `make` in the module `guest` of each folder returns, unless it is None."""
    for module in modules(sys.modules[__name__], "guest"):
        guest: Guest | None = module.make(gateway, settings)
        if guest is not None:
            gateway.add_guests([guest])
