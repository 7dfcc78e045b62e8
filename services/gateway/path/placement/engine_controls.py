"""Drains engines and resumes them, and sends them other orders of operators. Called by endpoints under `/admin`."""

from dataclasses import dataclass

from antiphon.services.gateway.path.placement.moves import Move, Moves
from antiphon.services.gateway.path.router import model_of, ready_members
from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Ack, EngineStatus, ErrorReply, Heartbeat, Message, Withdraw

_ACK = Decoder([Ack, ErrorReply])


@dataclass(frozen=True, slots=True)
class EngineView:
    """This gateway's information on an engine.

    `num_sequences`: sequences of all gateways that run or wait there. `moved`: sequences of this gateway that have
    moved away since the engine was last drained. `others`: ids of the model's other engines that accept sequences.
    """

    beat: Heartbeat
    num_sequences: int
    moved: list[Move]
    others: list[str]


class EngineControls:
    """The engines that one gateway knows."""

    def __init__(self, host: Host, members: Members, moves: Moves) -> None:
        self._host, self._members, self._moves = host, members, moves

    def view(self, engine_id: str) -> EngineView:
        """Returns the information on an engine. Raises ServiceError('not_found') if no such engine is running."""
        engines = self._members.alive("engine", self._host.clock.monotonic())
        found = next((engine for engine in engines if engine.id == engine_id), None)
        if found is None or not isinstance(found.status, EngineStatus):
            known = ", ".join(engine.id for engine in engines) or "none"
            raise ServiceError("not_found", f"No engine is called {engine_id!r}. Engines that are alive: {known}.")
        others = [one.id for one in ready_members(engines, model_of(found)) if one.id != engine_id]
        num_sequences = found.status.load.num_running + found.status.load.num_waiting
        return EngineView(found, num_sequences, self._moves.of(engine_id), others)

    async def withdraw(self, engine_id: str, *, force: bool) -> EngineView:
        """Drains an engine. Its sequences move as soon as other engines have room for them.

        Without `force` the last engine of a model is not drained, because the model could not be used any more.
        """
        view = self.view(engine_id)
        if not view.others and not force:
            model = model_of(view.beat)
            reason = f"{engine_id!r} is the only engine of the model {model!r} that takes requests: nothing could move."
            raise ServiceError("invalid_value", f"{reason} Start another one first, or force it.", param="force")
        if view.beat.state == "ready":
            self._moves.forget(engine_id)
        await self.order(view.beat, Withdraw(withdrawn=True))
        return self.view(engine_id)

    async def resume(self, engine_id: str) -> EngineView:
        """Ends the draining of an engine."""
        await self.order(self.view(engine_id).beat, Withdraw(withdrawn=False))
        return self.view(engine_id)

    async def order(self, engine: Heartbeat, message: Message) -> None:
        """Sends an engine a message that it answers with `Ack`. Raises ServiceError if it does not, or refuses."""
        subject = self._host.subjects.engine_control(engine.id, engine.instance_id)
        try:
            await ask(self._host.transport, subject, message, _ACK, timeout_s=limits.OPEN_TIMEOUT_S)
        except (NoRespondersError, RequestTimeoutError) as error:
            raise ServiceError("no_engine", f"The engine {engine.id} does not answer.", retry_after_s=1.0) from error
