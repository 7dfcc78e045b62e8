"""The versions of models in one gateway: which version gets the requests for a name, and orders for launchers.

See `antiphon.shared.deployment.model_versions`. The state is read from the store at the start; afterwards launchers
announce changes.
"""

import asyncio
import logging

from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.key_value import StoreUnavailableError
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder
from antiphon.shared.deployment.model_versions import (
    DECODER,
    ModelState,
    ModelStates,
    VersionStore,
    hidden,
    routed,
    version_name,
)
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChangeModel, ErrorReply, Message, ModelsChanged

log = logging.getLogger(__name__)
_CHANGED = Decoder([ModelsChanged, ErrorReply])
ORDER_S = 5.0
"""Time for a launcher to accept an order, seconds. It carries the order out afterwards."""
LAUNCHER_TRIES, LAUNCHER_POLL_S = 10, 0.2
"""How often and at which interval, in seconds, an order is sent until a launcher takes it: a launcher joins the bus
only after its server is ready."""


class VersionDirectory:
    """The versions of all models of a deployment."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._store = VersionStore(host)
        self.states = ModelStates()
        self._use(self.states)

    async def read(self) -> None:
        """Reads the store.

        Without an answer, each model is assumed to have only the version with which its launcher was started.
        """
        try:
            states = await self._store.read()
        except StoreUnavailableError as error:
            log.info("the versions of models are not known: %s", error)
            return
        if states.changes > self.states.changes:
            self._use(states)

    def changed(self, message: ModelsChanged) -> None:
        """Applies a change that a launcher announces."""
        states = DECODER.decode(message.states)
        if states.changes > self.states.changes:
            self._use(states)

    def serving(self, name: str) -> str:
        """Returns the bus name of the version that serves a model."""
        return self._routed.get(name, name)

    def public(self, internal: str) -> str | None:
        """Returns the model that members with this bus name serve; None if requests do not reach them."""
        return None if internal in self._hidden else self._public.get(internal, internal)

    def is_withdrawn(self, name: str) -> bool:
        """Whether a model that was served, or is being loaded, must not get requests."""
        state = self.states.find(name)
        return state is not None and not state.active

    async def order(self, order: ChangeModel) -> None:
        """Sends an order to a launcher. Raises ServiceError if no launcher answers or if the launcher refuses."""
        try:
            reply = await self._ask(order)
        except NoRespondersError as error:
            message = (
                "The processes of this deployment are not started by `antiphon serve`, which would start other ones. "
                "With Compose or Kubernetes, add one without gateways (docs/guides/several-models.md), or start the "
                "engines, tokenizers and detokenizers of the new model or version with a --served-model-name of their "
                "own, and move the clients to that name."
            )
            raise ServiceError("unsupported_parameter", message) from error
        except RequestTimeoutError as error:
            raise ServiceError("timeout", "The launcher does not answer.", retry_after_s=limits.LEASE_S) from error
        assert isinstance(reply, ModelsChanged)
        self.changed(reply)

    async def _ask(self, order: ChangeModel) -> Message:
        subject, tries = self._host.subjects.models_control(), LAUNCHER_TRIES
        while True:
            try:
                return await ask(self._host.transport, subject, order, _CHANGED, timeout_s=ORDER_S)
            except NoRespondersError:
                tries -= 1
                if not tries:
                    raise
            await asyncio.sleep(LAUNCHER_POLL_S)

    def _use(self, states: ModelStates) -> None:
        self.states = states
        self._routed = routed(states)
        self._public = {internal: name for name, internal in self._routed.items()}
        self._hidden = hidden(states)
        self.shadows: dict[str, tuple[ModelState, str, float]] = {
            one.name: (one, version_name(one.name, one.shadow.number), one.shadow.share)
            for one in states.models
            if one.shadow is not None
        }
        """For each model with a shadow version: its state, the shadow's bus name, and the share of copies."""
