"""How ranks of other machines join: both sides prove that they have the key, and nothing that comes can do harm."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from antiphon.services.engine.executor import rank as rank_program
from antiphon.services.engine.executor.channel import (
    MESSAGE_BYTES_MAX,
    Channel,
    ChannelClosed,
    Loaded,
    Start,
    send_frame,
)
from antiphon.services.engine.executor.joining import FRAME_BYTES_MAX, JoinRefused, Listener, join
from antiphon.services.engine.executor.rank_processes import Rank, RankWatch
from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.world import AGAIN, rank_key
from antiphon.shared.flags import SettingsError

KEY = b"the key of this test"
SETTINGS = EngineSettings(nnode=2, pod_ips="127.0.0.1,127.0.0.2", tensor_parallel_size=2)
HEAD = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(HEAD, 0, KEY)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def gathering(listener: Listener, threads: ThreadPoolExecutor) -> Iterator["Future[dict[int, socket.socket]]"]:
    """The first rank, which waits for rank 1."""
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise ChannelClosed("the test has ended")

    found = threads.submit(listener.gather, {1: "127.0.0.2"}, SETTINGS, check)
    yield found
    stop.set()
    if found.exception() is None:
        for each in found.result().values():
            each.close()


Gathering = Future[dict[int, socket.socket]]


def test_a_rank_with_the_key_joins_and_gets_messages(listener: Listener, gathering: Gathering) -> None:
    # The first rank says for how many sequences there is room, whatever the setting here.
    with join(HEAD, listener.port, 1, replace(SETTINGS, max_num_seqs=7), KEY) as end:
        first, other = Channel(gathering.result(60)[1]), Channel(end)
        first.send(Start(Meeting(host=HEAD, port=1), 8))
        assert other.command() == Start(Meeting(host=HEAD, port=1), 8)
        other.send(Loaded(3, "c", "w"))
        assert first.reply() == Loaded(3, "c", "w")


@pytest.mark.parametrize(
    ("rank", "settings", "key", "said"),
    [
        (1, SETTINGS, b"another key of this test", r"another key \(--cluster-key-file\)"),
        (0, SETTINGS, KEY, "rank 0 is not one of another machine; check --pod-ips and NODE_RANK"),
        (
            1,
            EngineSettings(nnode=2, pod_ips=SETTINGS.parallel.pod_ips, tensor_parallel_size=2, block_size=128),
            KEY,
            "--block-size is 128 there and 16 at the first machine; start the same command on each",
        ),
    ],
)
def test_a_rank_that_cannot_take_part_is_told_why_and_others_still_join(
    rank: int, settings: EngineSettings, key: bytes, said: str, listener: Listener, gathering: Gathering
) -> None:
    with pytest.raises(JoinRefused, match=said.replace("16", str(SETTINGS.cache.block_size))):
        join(HEAD, listener.port, rank, settings, key)
    with join(HEAD, listener.port, 1, SETTINGS, KEY):
        assert set(gathering.result(60)) == {1}


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", (1 << 60).to_bytes(8, "little"), (FRAME_BYTES_MAX + 1).to_bytes(8, "little") + b"x"],
)
def test_what_is_no_rank_is_dropped(data: bytes, listener: Listener, gathering: Gathering) -> None:
    with socket.create_connection((HEAD, listener.port)) as stranger:
        stranger.sendall(data)
        with join(HEAD, listener.port, 1, SETTINGS, KEY):
            assert set(gathering.result(60)) == {1}


def test_an_answer_with_the_proof_of_the_first_rank_is_refused(listener: Listener, gathering: Gathering) -> None:
    with socket.create_connection((HEAD, listener.port)) as one:
        # What the first rank has sent may not be sent back to it.
        size = int.from_bytes(one.recv(8, socket.MSG_WAITALL), "little")
        challenge = msgspec.msgpack.decode(one.recv(size, socket.MSG_WAITALL))
        answer = {"type": "_Answer", "rank": 1, "nonce": challenge["nonce"], "proof": challenge["nonce"]}
        send_frame(one, msgspec.msgpack.encode(answer))
        size = int.from_bytes(one.recv(8, socket.MSG_WAITALL), "little")
        assert msgspec.msgpack.decode(one.recv(size, socket.MSG_WAITALL))["proof"] == b""
        assert one.recv(1) == b""
    with join(HEAD, listener.port, 1, SETTINGS, KEY):
        assert set(gathering.result(60)) == {1}


def test_a_rank_that_joins_again_replaces_its_former_self(listener: Listener, threads: ThreadPoolExecutor) -> None:
    found = threads.submit(listener.gather, {1: "a", 2: "a"}, SETTINGS)
    join(HEAD, listener.port, 1, SETTINGS, KEY).close()
    with join(HEAD, listener.port, 1, SETTINGS, KEY) as again, join(HEAD, listener.port, 2, SETTINGS, KEY):
        ends = found.result(60)
        Channel(ends[1]).send(Start(Meeting(), 8))
        assert Channel(again).command() == Start(Meeting(), 8)
        for end in ends.values():
            end.close()


def test_the_program_of_a_rank_says_how_it_ended(
    listener: Listener, gathering: Gathering, threads: ThreadPoolExecutor
) -> None:
    words = [
        "--nnode=2",
        f"--pod-ips={SETTINGS.parallel.pod_ips}",
        f"--master-port={listener.port}",
        "-tp=2",
        "--rank=1",
    ]
    assert rank_program.main([*words, "--dtype=float32"], KEY) == 78
    # The first rank ends before it says where the ranks meet.
    ended = threads.submit(rank_program.main, words, KEY)
    gathering.result(60)[1].close()
    assert ended.result(60) == AGAIN
    listener.close()
    assert rank_program.main([*words, "--tries=1"], KEY) == AGAIN


def test_a_port_in_use_is_told(listener: Listener) -> None:
    with pytest.raises(SettingsError, match=f"--master-port: port {listener.port} of 127.0.0.1 cannot be listened on"):
        Listener(HEAD, listener.port, KEY)


@pytest.mark.parametrize(
    "send",
    [
        lambda end: end.sendall((MESSAGE_BYTES_MAX + 1).to_bytes(8, "little")),
        lambda end: send_frame(end, b"\xc1"),
        lambda end: send_frame(end, msgspec.msgpack.encode({"type": "Computed", "step": "x"})),
        lambda end: end.close(),
    ],
)
def test_a_message_that_cannot_be_ends_the_channel(send: Callable[[socket.socket], None]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs)
        with pytest.raises(ChannelClosed):
            Channel(ours).reply()


def test_the_watch_notices_a_rank_that_ends_while_nothing_is_sent() -> None:
    ours, theirs = socket.socketpair()
    told: Future[str] = Future()
    watch = RankWatch([Rank(3, "192.0.2.2", ours)], told.set_result)
    theirs.close()
    assert told.result(60) == "rank 3 on 192.0.2.2 has ended, or its machine does not answer"
    watch.close()
    ours.close()


def test_the_key_file_is_needed_where_machines_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    apart = EngineSettings(nnode=2, pod_ips="127.0.0.1,192.0.2.2", tensor_parallel_size=2)
    with pytest.raises(SettingsError, match="--cluster-key-file is needed, since the model is on several machines"):
        rank_key(apart.parallel)
    assert rank_key(SETTINGS.parallel) == rank_key(SETTINGS.parallel)
