import asyncio
from pathlib import Path

import pytest

from antiphon.services.detokenizer.service import DetokenizerService
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.codec import Decoder, encode
from antiphon.shared.config import DetokenizerSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import Ack, CloseStream, ErrorReply, OpenStream, StreamStatus
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.tokenizer_files import byte_level, write_tokenizer_files


async def test_a_drain_waits_for_open_streams_and_still_takes_new_ones(tmp_path: Path) -> None:
    bus, subjects = MemoryBus(), Subjects()
    own, peer = bus.connect("detokenizer"), bus.connect("peer")
    directory = str(write_tokenizer_files(tmp_path, byte_level()))
    service = DetokenizerService(DetokenizerSettings(model=directory, served_model_name="m"))
    assert service.status() == StreamStatus(model="m")
    await service.start(Host(transport=own, subjects=subjects, clock=SystemClock(), id="d1", instance_id="b1"))
    run, control = asyncio.create_task(service.run()), subjects.detokenizer_control("d1", "b1")
    replies = Decoder([Ack, ErrorReply])
    await ask(
        peer,
        control,
        OpenStream(sequence_id="r1", attempt=1, model="m", reply_subject="reply", engine_subject="engine"),
        replies,
        timeout_s=60,
    )
    drain = asyncio.create_task(service.drain())
    await ask(
        peer,
        control,
        OpenStream(sequence_id="r2", attempt=1, model="m", reply_subject="reply", engine_subject="engine"),
        replies,
        timeout_s=60,
    )
    assert service.status().num_streams == 2
    await peer.publish(control, encode(CloseStream("r1", 1)))
    await asyncio.wait({drain}, timeout=0.5)
    assert not drain.done()
    await peer.publish(control, encode(CloseStream("r2", 1)))
    await drain
    await run
    await own.close()
    await peer.close()


def test_a_missing_directory_is_a_settings_error_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="--model"):
        DetokenizerService(DetokenizerSettings(model="/no/such/model"))
