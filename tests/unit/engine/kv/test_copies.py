"""An engine of another machine goes on with copies of KV; a keeper or a sender that misbehaves costs no token."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.services.engine.kv.channel import Channel, connect
from antiphon.services.engine.kv.disk.tier import DiskTier
from antiphon.services.engine.kv.peers.copies import Keeper
from antiphon.services.engine.kv.peers.ring import next_keeper
from antiphon.services.engine.kv.pieces import checksum
from antiphon.services.engine.kv.wire import VERSION, Block, Failed, Header, Kept, Offer, Want
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import EngineStatus, Heartbeat
from tests.models import make_model
from tests.support.slow import slow_but
from tests.unit.engine.kv.engines import END_S, PROMPT, Running, started
from tests.unit.engine.kv.test_disk_tier import FAMILIES, answer, loaded, written


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_TIER_TOKENS_MIN", 32)
    monkeypatch.setattr(limits, "KV_COPIES_SILENCE_S", 0.5)


@contextlib.contextmanager
def with_copies(model: Path, path: Path, **settings: Any) -> Iterator[Running]:
    base = {"kv_disk_gb": 0.1, "kv_disk_path": str(path), "kv_replicate": "peer", "kv_host": "127.0.0.1"}
    with started(model, **{**base, **settings}) as running:
        yield running


def tier(running: Running) -> DiskTier:
    assert running.engine.connector is not None
    assert running.engine.connector.tier is not None
    return running.engine.connector.tier


def keeper_at(running: Running, name: str = "other") -> Keeper:
    """What an engine answers when it is asked to keep copies."""
    connector = running.engine.connector
    assert connector is not None
    assert connector.keeper is not None
    return Keeper(name, name, connector.address, connector.keeper.admit("one"))


def send_to(running: Running, keeper: Keeper | None) -> None:
    assert running.engine.connector is not None
    running.engine.connector.keep_copies_at(keeper)


def copied(one: Running, other: Running) -> None:
    """Waits until another engine has all that was written."""
    written(one)
    until(lambda: set(tier(one).store._places) <= set(tier(other).store._places), one, other)


def until(is_true: Callable[[], bool], *running: Running) -> None:
    deadline = time.monotonic() + END_S
    while not is_true():
        assert time.monotonic() < deadline
        for each in running:
            each.engine.step()
        time.sleep(0.002)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("family", slow_but(["llama", "qwen3_5"], list(FAMILIES)))
def test_another_machine_goes_on_with_the_copies(family: str, backend: str, tmp_path: Path) -> None:
    name, overrides = FAMILIES[family]
    model = make_model(tmp_path / "model", name, **overrides)
    with (
        with_copies(model, tmp_path / "one", cpu_backend=backend) as one,
        with_copies(model, tmp_path / "other", cpu_backend=backend) as other,
        started(model, cpu_backend=backend) as alone,
    ):
        right = answer(alone, "right", max_tokens=40)
        send_to(one, keeper_at(other))
        assert answer(one, "whole", max_tokens=40) == right
        copied(one, other)
        assert answer(other, "rest", (*PROMPT, *right[:30]), max_tokens=10) == right[30:]
        assert loaded(other) == other.cached["rest"] >= 96
        one.idle()
        other.idle()


def test_what_was_stored_before_is_copied_when_it_is_used(model: Path, tmp_path: Path) -> None:
    with with_copies(model, tmp_path / "one") as first:
        right = answer(first, "right")
        written(first)
    with with_copies(model, tmp_path / "one") as one, with_copies(model, tmp_path / "other") as other:
        send_to(one, keeper_at(other))
        assert answer(one, "again") == right
        assert loaded(one) == 96
        copied(one, other)
        assert answer(other, "there") == right
        assert loaded(other) == 96


def test_the_next_keeper_gets_what_the_lost_one_had(model: Path, tmp_path: Path) -> None:
    with with_copies(model, tmp_path / "one") as one, with_copies(model, tmp_path / "other") as other:
        with with_copies(model, tmp_path / "lost") as lost:
            send_to(one, keeper_at(lost))
            right = answer(one, "right")
            copied(one, lost)
        send_to(one, keeper_at(other))
        copied(one, other)
        assert answer(other, "there") == right
        assert loaded(other) == 96


# --- a keeper that misbehaves -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(serve: Callable[[Channel], Coroutine[Any, Any, None]]) -> Iterator[Keeper]:
    """A keeper on a thread, whose connections `serve` answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(END_S)

        def accept() -> None:
            with contextlib.suppress(OSError, TimeoutError):
                sock, _ = server.accept()
                channel = Channel(sock)
                asyncio.run(serve(channel))
                channel.close()

        thread = threading.Thread(target=accept)
        thread.start()
        host, port = server.getsockname()
        yield Keeper("bad", "bad", f"{host}:{port}", "")
        server.close()
        thread.join(END_S)


async def hangs(channel: Channel) -> None:
    await channel.receive()
    await asyncio.sleep(1.5)


async def closes(channel: Channel) -> None:
    await channel.receive()


async def wants_what_is_not_there(channel: Channel) -> None:
    await channel.receive()
    await channel.send(Want((7000,)))
    await asyncio.sleep(0.2)


async def is_full(channel: Channel) -> None:
    await channel.receive()
    await channel.send(Failed("the disk takes no blocks now"))
    await asyncio.sleep(0.2)


async def hangs_within_a_block(channel: Channel) -> None:
    offer = await channel.receive()
    assert isinstance(offer, Offer)
    await channel.send(Want((0,)))
    await asyncio.sleep(1.5)


@pytest.mark.matrix("K-05")
@pytest.mark.parametrize("serve", [hangs, closes, wants_what_is_not_there, is_full, hangs_within_a_block])
def test_a_keeper_that_misbehaves_is_given_up(model: Path, tmp_path: Path, serve: Any) -> None:
    with (
        with_copies(model, tmp_path / "one") as one,
        with_copies(model, tmp_path / "other") as other,
        listening(serve) as bad,
    ):
        send_to(one, bad)
        right = answer(one, "right")
        connector = one.engine.connector
        assert connector is not None
        until(lambda: bool(connector.lost_keepers), one)
        assert connector.lost_keepers.popleft() == bad
        send_to(one, keeper_at(other))
        copied(one, other)
        assert answer(other, "there") == right
        assert loaded(other) == 96


# --- a sender that misbehaves -----------------------------------------------------------------------------------------


def send(keeper: Keeper, name: bytes, *blocks: tuple[Block, np.ndarray[Any, Any] | None]) -> Header:
    """Offers a block, sends what is given, and returns the last answer."""

    async def run() -> Header:
        channel = await connect(keeper.address)
        try:
            await channel.send(Offer(version=VERSION, token=keeper.token, names=(name,)))
            answered = await channel.receive()
            for block, data in blocks:
                assert answered == Want((0,))
                await channel.send(block, data)
                answered = await channel.receive()
            return answered
        finally:
            channel.close()

    return asyncio.run(run())


@pytest.mark.matrix("K-06")
def test_blocks_of_a_sender_that_lies_are_not_kept(model: Path, tmp_path: Path) -> None:
    with with_copies(model, tmp_path) as other:
        keeper, size = keeper_at(other), tier(other).block_bytes
        data = np.arange(size, dtype=np.uint8)
        right = Block(name=b"a", num_tokens=0, checksum=checksum(data), size=size)
        lies = [
            ({"checksum": right.checksum ^ 1}, "damaged"),
            ({"name": b"b"}, "not asked for"),
            ({"size": size - 1}, "not asked for"),
        ]
        for change, reason in lies:
            kwargs = {field: getattr(right, field) for field in ("name", "num_tokens", "checksum", "size")}
            refused = send(keeper, b"a", (Block(**{**kwargs, **change}), data))
            assert isinstance(refused, Failed)
            assert reason in refused.reason
        unknown = send(keeper._replace(token="unknown"), b"a")
        assert isinstance(unknown, Failed)
        assert not len(tier(other).store)
        assert send(keeper, b"a", (replace_size(right, 0), None)) == Kept()
        assert not len(tier(other).store)
        assert send(keeper, b"a", (right, data)) == Kept()
        assert b"a" in tier(other)
        assert send(keeper, b"a") == Want(())


def replace_size(block: Block, size: int) -> Block:
    return Block(name=block.name, num_tokens=0, checksum=0, size=size)


def test_an_engine_whose_disk_is_full_keeps_nothing(model: Path, tmp_path: Path) -> None:
    with with_copies(model, tmp_path) as other:
        tier(other).store._not_before_s = time.monotonic() + 100
        data = np.zeros(tier(other).block_bytes, dtype=np.uint8)
        block = Block(name=b"a", num_tokens=0, checksum=checksum(data), size=data.nbytes)
        refused = send(keeper_at(other), b"a", (block, data))
        assert refused == Failed("the disk takes no blocks now")


def test_without_kv_replicate_no_copies_are_taken(model: Path, tmp_path: Path) -> None:
    with with_copies(model, tmp_path, kv_replicate="none", role="prefill") as other:
        connector = other.engine.connector
        assert connector is not None
        assert connector.keeper is None
        assert isinstance(send(Keeper("x", "x", connector.address, ""), b"a"), Failed)


def test_copies_without_a_disk_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"--kv-replicate peer .* --kv-disk-gb"):
        check_engine(EngineSettings(model="x", kv_replicate="peer"))


# --- the ring ---------------------------------------------------------------------------------------------------------


def status(store: str, **changes: Any) -> EngineStatus:
    sizes = {"max_model_len": 1, "vocab_size": 1, "block_size": 1, "num_blocks": 1, "max_num_seqs": 1}
    base = {"model": "m", "model_path": "p", "content": "c", "configuration": "k", "kv_store": store}
    return EngineStatus(**{**sizes, **base, **changes})


def beat(name: str, store: str, state: Any = "ready", **changes: Any) -> Heartbeat:
    status_of = status(store, **changes)
    return Heartbeat(
        service="engine",
        id=name,
        instance_id=f"i-{name}",
        protocol=1,
        state=state,
        sequence=1,
        interval_s=0.1,
        status=status_of,
    )


def test_each_engine_takes_the_next_one_that_can() -> None:
    ring = [beat("a", "1"), beat("b", "2"), beat("c", "3"), beat("d", "1")]
    found = {each.id: next_keeper(each.id, status(each.status.kv_store), ring, ()) for each in ring}  # type: ignore[union-attr]
    assert {name: None if one is None else one.id for name, one in found.items()} == {
        "a": "b", "b": "c", "c": "d", "d": "b"
    }  # fmt: skip
    others = [beat("b", "2", content="x"), beat("c", "3", configuration="x"), beat("d", ""), beat("e", "4", "draining")]
    assert next_keeper("a", status("1"), others, ()) is None
    assert next_keeper("a", status("1"), ring, {"i-b"}).id == "c"  # type: ignore[union-attr]
