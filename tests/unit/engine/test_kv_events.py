"""KV events over ZeroMQ: a real subscriber and a real replay, decoded by definitions written after vLLM's layout."""

import time
from collections.abc import Iterator

import msgspec
import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, SampledLogprobs, StepResult
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.kv_events import publisher as publisher_module
from antiphon.services.engine.kv_events.events import EventCollector
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.settings import kv_events as settings_module
from antiphon.shared.settings.kv_events import KvEventsConfig, kv_events_of, of_replica
from tests.conftest import free_port

zmq = pytest.importorskip("zmq")
SIZE, NUM_BLOCKS = 4, 8
WAIT_MS = 10_000


class Event(msgspec.Struct, tag=True):
    """The receiver's side: fields by name, further ones are ignored."""


class BlockStored(Event, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Router:
    """What a router outside does: it follows, and keeps the blocks by their hashes."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.numbers: list[int] = []
        self.topics: set[bytes] = set()
        self.batches: list[Batch] = []
        self.prefixes: dict[bytes | int, tuple[int, ...]] = {}

    def take(self, timeout_ms: int = WAIT_MS) -> bool:
        if not self.socket.poll(timeout_ms):
            return False
        topic, number, payload = self.socket.recv_multipart()
        self.topics.add(topic)
        self.numbers.append(int.from_bytes(number, "big"))
        self.apply(DECODER.decode(payload))
        return True

    def apply(self, batch: Batch) -> None:
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    before = () if event.parent_block_hash is None else self.prefixes[event.parent_block_hash]
                    for place, name in enumerate(event.block_hashes):
                        before += tuple(event.token_ids[place * event.block_size : (place + 1) * event.block_size])
                        self.prefixes[name] = before
                case BlockRemoved():
                    for name in event.block_hashes:
                        self.prefixes.pop(name, None)  # it may have come before the subscription
                case AllBlocksCleared():
                    self.prefixes.clear()

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def endpoints() -> tuple[str, str]:
    return f"tcp://*:{free_port()}", f"tcp://*:{free_port()}"


@pytest.fixture
def core() -> Core:
    facts = EngineFacts(num_blocks=NUM_BLOCKS, block_size=SIZE, max_model_len=30, vocab_size=1000)
    return Core(CoreLimits(max_num_seqs=2, max_num_batched_tokens=32), facts)


@pytest.fixture
def published(core: Core, endpoints: tuple[str, str]) -> Iterator[publisher_module.KvEventPublisher]:
    endpoint, replay = endpoints
    config = KvEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay, topic="kv@pod@m", buffer_steps=5
    )
    made = publisher_module.KvEventPublisher(config, core)
    yield made
    made.close()


def local(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def compute(core: Core, name: str, prompt: list[int], **fields) -> None:
    """One sequence to its end."""
    spec = SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=1), **fields)
    core.add(spec)
    while name in core:
        plan = core.schedule()
        count = sum(share.samples for share in plan.scheduled)
        core.apply(
            plan,
            StepResult(step=plan.step, token_ids=((7,),) * count, logprobs=((SampledLogprobs(-1.0),),) * count),
        )


def joined(router: Router, core: Core) -> int:
    """Computes prompts until the subscription has arrived; returns how many."""
    number = 0
    while not router.take(50):
        compute(core, f"joining{number}", [500 + number] * (SIZE + 1))
        number += 1
        assert number < 200, "nothing was published"
    while router.take(200):
        pass
    return number


def answers(endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """What a replay from this number on gives, by a DEALER as routers use it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(local(endpoint))
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            assert socket.poll(WAIT_MS), "no answer"
            _, number, payload = socket.recv_multipart()
            found.append((int.from_bytes(number, "big", signed=True), payload))
            if found[-1][0] == -1:
                return found


def replayed(endpoint: str, last: int) -> list[tuple[int, bytes]]:
    """What a replay of everything gives when the batch with this number is published."""
    ends = time.monotonic() + WAIT_MS / 1000
    while (found := answers(endpoint, 0))[-2:-1] == [] or found[-2][0] < last:
        assert time.monotonic() < ends, found
    return found


def test_a_router_knows_the_tokens_of_all_blocks_also_after_evictions(core, endpoints, published):
    router = Router(local(endpoints[0]), "kv@")
    try:
        joined(router, core)
        known = {number: list(range(number, number + 3 * SIZE + 1)) for number in (10, 100, 200, 300)}
        for number, prompt in known.items():
            compute(core, f"p{number}", prompt)
        while router.take(300):
            pass
        prefixes = set(router.prefixes.values())
        held = {tuple(known[300][: SIZE * count]) for count in (1, 2, 3)}
        assert held <= prefixes
        assert len(prefixes) <= NUM_BLOCKS
        assert router.topics == {b"kv@pod@m"}
        assert router.numbers == list(range(router.numbers[0], router.numbers[0] + len(router.numbers)))
        assert [batch.data_parallel_rank for batch in router.batches] == [0] * len(router.batches)
        assert abs(router.batches[-1].ts - time.time()) < 60
        assert any(isinstance(event, BlockRemoved) for batch in router.batches for event in batch.events)
    finally:
        router.close()


def test_the_bytes_are_an_array_of_maps_as_in_vllm(core, endpoints, published):
    compute(core, "s", list(range(2 * SIZE + 1)))
    (_, cleared), (_, payload), _ = replayed(endpoints[1], 1)
    assert msgspec.msgpack.decode(cleared)[1:] == [[{"type": "AllBlocksCleared"}], 0]
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (type(ts), rank) == (float, 0)
    first, second = events[0].pop("block_hashes")
    assert 0 <= first < 2**64 != second
    assert events == [
        {
            "type": "BlockStored",
            "parent_block_hash": None,
            "token_ids": list(range(2 * SIZE)),
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_a_replay_has_the_latest_batches_from_the_asked_one_on(core, endpoints, published):
    for number in range(8):
        compute(core, f"s{number}", [number] * (SIZE + 1))
        replayed(endpoints[1], number + 1)
    found = [number for number, _ in answers(endpoints[1], 0)]
    assert len(found) == 6  # five are kept
    assert found[-1] == -1
    assert [number for number, _ in answers(endpoints[1], found[3])] == found[3:]
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:  # a REQ socket gets the first answer only
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(local(endpoints[1]))
        socket.send(found[4].to_bytes(8, "big"))
        assert socket.poll(WAIT_MS)
        assert socket.recv_multipart()[0] == found[4].to_bytes(8, "big")


def test_salted_prompts_have_extra_keys_that_do_not_show_the_salt(core, endpoints, published):
    compute(core, "s", list(range(2 * SIZE + 1)), cache_salt=b"secret of a tenant")
    payload = replayed(endpoints[1], 1)[1][1]
    (event,) = DECODER.decode(payload).events
    assert isinstance(event, BlockStored)
    assert event.extra_keys is not None
    assert event.extra_keys[1] is None
    assert event.extra_keys[0]
    assert b"secret" not in payload


def test_without_receivers_events_are_bounded_and_a_gap_is_visible(core):
    woken: list[int] = []
    collector = EventCollector(SIZE, 3, lambda: woken.append(1))
    for number in range(5):
        collector.removed(bytes([number]) * 16)
    assert collector.lost
    assert len(woken) == 3
    (event,) = collector.take()
    assert msgspec.to_builtins(event)["block_hashes"] == [int.from_bytes(bytes([n]) * 8, "big") for n in range(3)]


def test_an_endpoint_in_use_ends_the_start_with_a_message(core, endpoints, published):
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=endpoints[0])
    with pytest.raises(SettingsError, match=r"--kv-events-config: the endpoint .* cannot be used .*choose another"):
        publisher_module.KvEventPublisher(config, core)


@pytest.mark.parametrize(
    "text", ["x", "[]", '{"publisher": "kafka"}', '{"unknown": 1}', '{"hwm": 0}', '{"hwm": "x"}', '{"topic": null}']
)
def test_a_wrong_option_is_not_a_config(text):
    assert kv_events_of(text) is None


def test_the_option_is_off_unless_it_is_enabled():
    assert [kv_events_of(text).is_on for text in ("", "{}", '{"publisher": "zmq"}')] == [False] * 3  # pyright: ignore[reportOptionalMemberAccess]
    on = '{"enable_kv_cache_events": true}'
    assert kv_events_of(on) == KvEventsConfig(enable_kv_cache_events=True)
    assert KvEventsConfig(enable_kv_cache_events=True).is_on
    assert not KvEventsConfig(enable_kv_cache_events=True, publisher="null").is_on


def test_each_engine_of_a_machine_has_its_own_ports():
    text = '{"endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///tmp/replay"}'
    assert of_replica(text, 0) == text
    moved = kv_events_of(of_replica(text, 2))
    assert moved is not None
    assert (moved.endpoint, moved.replay_endpoint) == ("tcp://*:5559", "ipc:///tmp/replay_dp2")


def test_contradictions_and_a_missing_package_are_told(monkeypatch):
    on = '{"enable_kv_cache_events": true}'
    with pytest.raises(SettingsError, match="--enable-prefix-caching"):
        check_engine(EngineSettings(kv_events_config=on, enable_prefix_caching=False))
    monkeypatch.setattr(settings_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'antiphon\[zmq\]'"):
        check_engine(EngineSettings(kv_events_config=on))
