"""R-09: a pool of tokenizer processes on a real server. A replica that dies or freezes costs a retry, not a request."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.shared.actors.actor import ask
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder, unpack_ids
from antiphon.shared.messages import ChatMessage, ErrorReply, Message, PoolStatus, TokenizeReply, TokenizeRequest
from antiphon.shared.subjects import Subjects
from tests.conftest import Connect, NatsServer
from tests.service_processes import Processes, Roster
from tests.tokenizer_files import SENTENCES, byte_level, write_tokenizer_files

pytestmark = pytest.mark.nats
REPLIES = Decoder([TokenizeReply, ErrorReply])
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class Pool:
    """The client's side: asks the queue group, and after silence a replica that is known to live."""

    def __init__(self, processes: Processes, roster: Roster, transport: NatsTransport, subjects: Subjects) -> None:
        self.processes, self.roster, self.transport, self.subjects = processes, roster, transport, subjects
        self.retries = 0
        self.first_try_s = 5.0
        self.tokenizer = byte_level()

    async def ask(self, message: TokenizeRequest) -> Message:
        subject, timeout_s = self.subjects.tokenize("m"), self.first_try_s
        deadline = time.monotonic() + 60
        while True:
            try:
                return await ask(self.transport, subject, message, REPLIES, timeout_s=timeout_s)
            except (NoRespondersError, RequestTimeoutError):
                assert time.monotonic() < deadline
                self.retries += 1
                timeout_s *= 2
                alive = self.roster.alive()
                if alive:
                    subject = self.subjects.tokenizer_direct(alive[0].id, alive[0].instance_id)

    async def check(self, n: int) -> None:
        text = f"{SENTENCES[n % len(SENTENCES)]} {n}"
        reply = await self.ask(TokenizeRequest(request_id=str(n), model="m", prompts=(text,)))
        assert isinstance(reply, TokenizeReply)
        assert reply.request_id == str(n)
        assert unpack_ids(reply.prompts[0].token_ids) == self.tokenizer.encode(text).ids


@pytest.fixture
async def pool(
    nats_server: NatsServer, nats_connect: Connect, subjects: Subjects, namespace: str, tmp_path: Path
) -> AsyncIterator[Pool]:
    directory = write_tokenizer_files(tmp_path / "model", byte_level(), chat_template=CHATML)
    processes, roster = Processes(nats_server, namespace), Roster()
    transport = await nats_connect(nats_server, "client")
    await roster.listen(transport, subjects)
    for name in ("t1", "t2"):
        await processes.start("tokenizer", name, directory)
    for name in ("t1", "t2"):
        await roster.wait_for(name)
    yield Pool(processes, roster, transport, subjects)
    await processes.close()


@pytest.mark.matrix("R-09")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_replica_that_goes_under_load_costs_a_retry_and_not_a_request(
    pool: Pool, fault: signal.Signals
) -> None:
    pool.first_try_s = 30.0 if fault == signal.SIGTERM else 0.25
    waves = [asyncio.create_task(pool.check(n)) for n in range(50)]
    await asyncio.sleep(0)
    pool.processes.signal("t1", fault)
    waves += [asyncio.create_task(pool.check(n)) for n in range(50, 100)]
    await asyncio.gather(*waves)
    if fault == signal.SIGTERM:
        assert await pool.processes.ended("t1") == 0
        assert pool.retries == 0, "a replica that leaves in good order answers what it has"
    if fault == signal.SIGSTOP:
        assert pool.retries > 0, "the queue group still feeds the frozen replica"


async def test_both_replicas_do_their_share_and_count_it(pool: Pool) -> None:
    await asyncio.gather(*map(pool.check, range(60)))

    def counts() -> list[int]:
        statuses = [beat.status for beat, _ in pool.roster.heard.values()]
        return [status.num_requests for status in statuses if isinstance(status, PoolStatus)]

    async with asyncio.timeout(60):
        while sum(counts()) < 60:
            pool.roster.changed.clear()
            await pool.roster.changed.wait()
    assert sum(counts()) == 60
    assert min(counts()) > 0


async def test_a_conversation_is_rendered_and_the_replica_leaves_no_process_behind(pool: Pool) -> None:
    request = TokenizeRequest(
        request_id="r", model="m", messages=(ChatMessage(role="user", content="é"),), add_special_tokens=False
    )
    replies = await asyncio.gather(*(pool.ask(request) for _ in range(20)))
    expected = pool.tokenizer.encode("<user>é").ids
    for reply in replies:
        assert isinstance(reply, TokenizeReply)
        assert unpack_ids(reply.prompts[0].token_ids) == expected
    workers = [pid for name in ("t1", "t2") for pid in children(pool.processes.running[name].pid)]
    assert workers
    for name in ("t1", "t2"):
        pool.processes.signal(name, signal.SIGTERM)
    for name in ("t1", "t2"):
        assert await pool.processes.ended(name) == 0
    async with asyncio.timeout(60):
        while still_there(workers):
            await asyncio.sleep(0.01)


def still_there(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]
