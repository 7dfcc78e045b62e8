"""The detokenizer as a service: loads the vocabulary, runs the actor and its periodic sweep."""

import asyncio
import contextlib

from antiphon.services.detokenizer.actor import DetokenizerActor
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import sleep_to_beat
from antiphon.shared.config import DetokenizerSettings
from antiphon.shared.messages import ServiceName, StreamStatus
from antiphon.shared.models.model_files import described, model_directory, model_name, tokenizer_directory
from antiphon.shared.text.vocabulary import Vocabulary, choose_vocabulary

SWEEP_S = 2 * limits.HEARTBEAT_INTERVAL_S
"""Interval of the sweep, seconds. If tokens follow a gap, the missing ones are requested at once; the sweep requests
them again if no further tokens arrive."""


class DetokenizerService:
    """One detokenizer. Files are loaded on a thread.

    Construction raises SettingsError if the directory of the tokenizer or of the model is not found.
    """

    name: ServiceName = "detokenizer"

    def __init__(self, settings: DetokenizerSettings) -> None:
        self._settings = described(settings)
        self._directories = tokenizer_directory(settings), model_directory(settings, weights=False)
        self._actor: DetokenizerActor | None = None

    async def start(self, host: Host) -> None:
        """See Service. Raises SettingsError if the directory has no usable tokenizer."""
        vocabulary = await asyncio.to_thread(self._load)
        self._actor = DetokenizerActor(host, vocabulary, model_name(self._settings))
        await self._actor.listen()
        self._actor_task = asyncio.create_task(self._actor.run())
        self._housekeeping = asyncio.create_task(self._keep_house(self._actor))

    def status(self) -> StreamStatus:
        """See Service."""
        actor, model = self._actor, model_name(self._settings)
        if actor is None:
            return StreamStatus(model=model)
        return StreamStatus(actor.num_streams, actor.text_events, actor.resends, model)

    async def run(self) -> None:
        """See Service."""
        done, _ = await asyncio.wait({self._actor_task, self._housekeeping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                await task

    async def drain(self) -> None:
        """See Service. Waits until all open streams have ended; gateways open new streams on other detokenizers.

        Streams are still opened meanwhile, because a gateway may not have received the heartbeat that says `draining`.
        """
        actor = self._actor
        assert actor is not None
        try:
            await asyncio.sleep(2 * limits.HEARTBEAT_INTERVAL_S)
            await actor.idle.wait()
        finally:
            await actor.stop()
            await self._actor_task
            self._housekeeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._housekeeping

    def _load(self) -> Vocabulary:
        return choose_vocabulary(self._settings, *self._directories)

    async def _keep_house(self, actor: DetokenizerActor) -> None:
        while True:
            await sleep_to_beat(SWEEP_S)
            actor.sweep()
