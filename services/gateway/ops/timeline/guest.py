"""The records of requests in one gateway: takes the engines' steps, and answers other gateways."""

from antiphon.services.gateway.ops.timeline.directory import BusRecordDirectory
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.messages import RecordList, RecordListQuery, RecordQuery, RecordReply, StepEvents


class Timeline(Guest):
    """The records of one gateway on the bus."""

    def __init__(self, gateway: GatewayActor, recorder: Recorder) -> None:
        self._gateway, self._recorder = gateway, recorder
        self.records = BusRecordDirectory(recorder, gateway.host, gateway.gateways)

    async def listen(self) -> None:
        """See Guest. Without records, engines are not heard, and therefore send no steps."""
        if self._recorder.is_on:
            await self._gateway.bind(self._gateway.host.subjects.steps(), StepEvents)

    @handles(StepEvents)
    def on_step_events(self, envelope: Envelope[StepEvents]) -> None:
        """Adds an engine's steps to the records of the requests that they computed."""
        message = envelope.message
        self._recorder.add_steps(message)

    @handles(RecordListQuery)
    def on_record_list_query(self, envelope: Envelope[RecordListQuery]) -> RecordList | RecordReply:
        """Tells another gateway which requests this one has recorded."""
        return self.records.answer(envelope.message)

    @handles(RecordQuery)
    def on_record_query(self, envelope: Envelope[RecordQuery]) -> RecordList | RecordReply:
        """Sends another gateway the record of one request."""
        return self.records.answer(envelope.message)
