"""Prompts computed by one engine and continued by another give the tokens of a single engine, whatever happens."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.services.engine.kv import shared_memory
from antiphon.services.engine.kv.connector import KvConnector
from antiphon.services.engine.kv.pieces import checksum
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import KvSource
from tests.conftest import free_port
from tests.support.transfer_faults import Faults, Kind
from tests.unit.engine.kv.engines import PROMPT, Running, run, started

SAMPLED = {"temperature": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Running]:
    """A single engine, for what is right."""
    with started(model) as running:
        yield running


@pytest.fixture(scope="module")
def prefill(model: Path) -> Iterator[Running]:
    with started(model, "prefill") as running:
        yield running


@pytest.fixture(scope="module")
def decode(model: Path) -> Iterator[Running]:
    # Without the prefix cache, so that each test transfers.
    with started(model, "decode", enable_prefix_caching=False) as running:
        yield running


@pytest.fixture(params=["shared memory", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "socket":
        monkeypatch.setattr(limits, "KV_SHARED_BYTES_MAX", 0)
    return request.param


def right(alone: Running, name: str, prompt: tuple[int, ...] = PROMPT, **params: Any) -> list[int]:
    alone.add(name, None, prompt, **params)
    return run(alone, until=(alone, name))


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [100, 96, 97, 17])
def test_the_tokens_are_those_of_a_single_engine_and_the_receiver_computes_one_of_the_prompt(
    params: dict[str, Any], length: int, way: str, alone: Running, prefill: Running, decode: Running
) -> None:
    prompt, name = PROMPT[:length], f"{length} {way} {bool(params)}"
    before = decode.engine.counters()
    source = prefill.compute_prompt(name, prompt)
    decode.add(name, source, prompt, **params)
    found = run(prefill, decode, until=(decode, name))
    assert found == right(alone, name, prompt, **params)
    after = decode.engine.counters()
    assert after.kv_loaded_tokens - before.kv_loaded_tokens == length - 1
    assert after.kv_failed_loads == before.kv_failed_loads
    prefill.idle()
    decode.idle()


def test_places_of_the_shared_memory_are_used_again(
    alone: Running, prefill: Running, decode: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decode.engine.connector is not None
    layout = decode.engine.connector._memory.layout
    monkeypatch.setattr(limits, "KV_SHARED_BYTES_MAX", 2 * layout.num_bytes(layout.block_size))
    expected = right(alone, "places")
    before = decode.engine.counters().kv_failed_loads
    decode.add("places", prefill.compute_prompt("places"))
    assert run(prefill, decode, until=(decode, "places")) == expected
    assert decode.engine.counters().kv_failed_loads == before


@pytest.mark.parametrize(
    ("sender", "receiver_settings"),
    [
        ({"cpu_backend": "torch"}, {}),
        ({}, {"cpu_backend": "torch"}),
        ({"cpu_backend": "torch", "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "bfloat16"}, {"cpu_backend": "torch", "dtype": "bfloat16"}),
        ({"cpu_backend": "torch", "kv_cache_dtype": "fp8"}, {"cpu_backend": "torch", "kv_cache_dtype": "fp8"}),
        ({"cpu_backend": "torch", "kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"cpu_backend": "torch", "kv_cache_dtype": "fp8_e5m2"}),
    ],
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_backends_differ_and_exchange_kv(
    sender: dict[str, Any], receiver_settings: dict[str, Any], block_size: int, model: Path
) -> None:
    """Blocks hold the same numbers, whoever has computed them: the continuation is that of the receiver alone."""
    with (
        started(model, "prefill", block_size=block_size, **sender) as prefill,
        started(model, "decode", block_size=block_size, **receiver_settings) as decode,
    ):
        decode.add("x", prefill.compute_prompt("x"))
        run(prefill, decode, until=(decode, "x"))
        assert decode.engine.counters().kv_loaded_tokens == len(PROMPT) - 1
        assert decode.engine.connector is not None
        assert decode.engine.connector._pool._kept, "the blocks did not go through shared memory"
        ours, theirs = prefill.engine._executor.kv_memory(), decode.engine._executor.kv_memory()
        assert ours.layout == theirs.layout
    with started(model, block_size=block_size, **receiver_settings) as alone:
        exact = receiver_settings.get("dtype") != "bfloat16" and "kv_cache_dtype" not in receiver_settings
        expected = right(alone, "x")
        assert decode.tokens["x"][:1] == expected[:1]
        assert decode.tokens["x"] == expected or not exact


@pytest.mark.parametrize("difference", ["weights", "dtype"])
def test_kv_of_other_weights_is_not_taken(
    difference: str, alone: Running, decode: Running, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, settings = tmp_path / "other", {}
    shutil.copytree(model, other)
    (file,) = other.glob("*.safetensors")
    if difference == "weights":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        # The same layout of KV, of values that were computed with another type.
        settings = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "cpu_backend": "torch"}
    taker = {"kv_cache_dtype": "fp8", "cpu_backend": "torch"} if settings else {}
    with started(other, "prefill", **settings) as prefill, started(model, "decode", **taker) as receiver:
        receiver.add(difference, prefill.compute_prompt(difference))
        tokens = run(prefill, receiver, until=(receiver, difference))
        assert receiver.engine.counters().kv_loaded_tokens == 0
        assert taker or tokens == right(alone, difference)
    assert "the engines have different weights, or compute with different types" in caplog.text


def loaded_with(faults: Faults, name: str, alone: Running, prefill: Running, decode: Running) -> int:
    """Runs a sequence whose transfer fails. Its tokens must be right all the same. Returns how many were loaded."""
    undo = faults.install()
    try:
        before = decode.engine.counters()
        decode.add(name, prefill.compute_prompt(name))
        assert run(prefill, decode, until=(decode, name)) == right(alone, name)
    finally:
        undo()
    after = decode.engine.counters()
    assert after.kv_failed_loads == before.kv_failed_loads + 1
    prefill.idle()
    decode.idle()
    return after.kv_loaded_tokens - before.kv_loaded_tokens


@pytest.mark.parametrize("kind", ["damage", "silence", "cut", "foreign", "short"])
@pytest.mark.parametrize("first", [0, 3])
def test_a_fault_costs_the_computation_of_the_rest(
    kind: Kind,
    first: int,
    way: str,
    alone: Running,
    prefill: Running,
    decode: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "KV_LEASE_S", 3.0)
    faults = Faults(kind, first)
    assert loaded_with(faults, f"{kind} {first} {way}", alone, prefill, decode) == 16 * first
    assert faults.hits


def test_a_block_that_comes_again_does_not_replace_the_first(
    way: str, alone: Running, prefill: Running, decode: Running
) -> None:
    """The second one is damaged, which is found only after it has been written."""
    faults = Faults("twice", 3)
    assert loaded_with(faults, f"twice {way}", alone, prefill, decode) == 16 * 4
    assert faults.hits == 1


def test_nobody_at_the_address(alone: Running, decode: Running) -> None:
    decode.add("nobody", KvSource("nobody", f"127.0.0.1:{free_port()}"))
    assert run(decode, until=(decode, "nobody")) == right(alone, "nobody")
    decode.add("no address", KvSource("no address", "nonsense"))
    assert run(decode, until=(decode, "no address")) == right(alone, "no address")


def test_a_transfer_that_is_never_announced(
    alone: Running, prefill: Running, decode: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_ARRIVAL_S", 0.4)
    assert prefill.engine.connector is not None
    decode.add("unknown", KvSource("unknown", prefill.engine.connector.address))
    assert run(decode, until=(decode, "unknown")) == right(alone, "unknown")


def test_a_transfer_may_be_asked_for_before_it_is_announced(alone: Running, prefill: Running, decode: Running) -> None:
    assert prefill.engine.connector is not None
    decode.add("early", KvSource("early", prefill.engine.connector.address))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert not decode.engine.step()
        time.sleep(0.01)
    before = decode.engine.counters().kv_failed_loads
    prefill.compute_prompt("early")
    assert run(prefill, decode, until=(decode, "early")) == right(alone, "early")
    assert decode.engine.counters().kv_failed_loads == before


def test_blocks_are_sent_while_the_prompt_is_computed(model: Path, alone: Running) -> None:
    with (
        started(model, "prefill", max_num_batched_tokens=16) as prefill,
        started(model, "decode") as decode,
    ):
        decode.add("x", prefill.compute_prompt("x"))
        while not prefill.engine.counters().kv_saved_tokens:
            prefill.engine.step()
            decode.engine.step()
        deadline = time.monotonic() + 60
        while prefill.engine._core.transfers.num_saved_blocks:
            assert time.monotonic() < deadline
            decode.engine.step()
            prefill.engine._loop._receive()  # pyright: ignore[reportPrivateUsage] - what has been sent is given back
            time.sleep(0.005)
        assert "p-x" in prefill.engine._core
        assert run(prefill, decode, until=(decode, "x")) == right(alone, "streamed")


def test_what_the_receiver_has_cached_is_not_sent(model: Path, prefill: Running) -> None:
    with started(model, "decode") as decode:
        decode.add("one", prefill.compute_prompt("one", PROMPT[:40]), PROMPT[:40])
        run(prefill, decode, until=(decode, "one"))
        assert decode.engine.counters().kv_loaded_tokens == 39
        decode.add("two", prefill.compute_prompt("two"))
        run(prefill, decode, until=(decode, "two"))
        assert decode.engine.counters().kv_loaded_tokens == 39 + 99 - 32
    prefill.idle()


def test_blocks_that_nobody_fetches_are_given_back(prefill: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_LEASE_S", 0.2)
    prefill.compute_prompt("forgotten")
    run(prefill, until=(prefill, "p-forgotten"))
    assert prefill.engine._core.transfers.num_saved_blocks
    prefill.idle()


def test_an_aborted_prompt_ends_the_wait(alone: Running, prefill: Running, decode: Running) -> None:
    decode.add("dropped", prefill.compute_prompt("dropped"))
    prefill.engine.abort("p-dropped")
    assert run(prefill, decode, until=(decode, "dropped")) == right(alone, "dropped")
    prefill.idle()


def test_an_aborted_sequence_gives_its_room_back(prefill: Running, decode: Running) -> None:
    assert prefill.engine.connector is not None
    decode.add("gone", KvSource("gone", prefill.engine.connector.address))
    decode.engine.step()
    decode.engine.abort("gone")
    decode.idle()


def test_an_engine_that_stands_still_lets_its_receivers_go(alone: Running, prefill: Running, decode: Running) -> None:
    assert prefill.engine.connector is not None
    decode.add("still", prefill.compute_prompt("still"))
    prefill.engine._loop._receive()  # pyright: ignore[reportPrivateUsage] - announced, but not computed
    prefill.engine._loop._exchange_kv()  # pyright: ignore[reportPrivateUsage]
    time.sleep(0.3)
    prefill.engine.connector.stand_still()
    assert run(decode, until=(decode, "still")) == right(alone, "still")
    run(prefill, until=(prefill, "p-still"))
    prefill.idle()


def test_a_sender_that_is_alive_but_makes_no_progress(
    alone: Running, prefill: Running, decode: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_PROGRESS_S", 0.5)
    decode.add("slow", prefill.compute_prompt("slow"))
    prefill.engine._loop._receive()  # pyright: ignore[reportPrivateUsage] - announced, but not computed
    prefill.engine._loop._exchange_kv()  # pyright: ignore[reportPrivateUsage]
    assert run(decode, until=(decode, "slow")) == right(alone, "slow")
    run(prefill, until=(prefill, "p-slow"))
    prefill.idle()


def test_if_the_thread_of_the_transfers_fails_prompts_are_computed(
    model: Path, alone: Running, prefill: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(model, "decode") as decode:

        def fail(self: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(type(prefill.engine.connector._sender), "expire", fail)  # type: ignore[union-attr]
        assert decode.engine.connector is not None
        decode.engine.connector._thread.join(60)  # pyright: ignore[reportPrivateUsage]
        monkeypatch.undo()
        decode.add("x", KvSource("x", "127.0.0.1:1"))
        assert run(decode, until=(decode, "x")) == right(alone, "x")


def test_engines_of_other_types_exchange_nothing(model: Path, alone: Running) -> None:
    with started(model, "prefill", dtype="bfloat16") as prefill, started(model, "decode") as decode:
        decode.add("x", prefill.compute_prompt("other type"))
        assert run(prefill, decode, until=(decode, "x")) == right(alone, "other type")
        assert decode.engine.counters().kv_loaded_tokens == 0


def noted_names(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of the shared memory that is made from now on."""
    made: list[Path] = []
    make = tempfile.mkstemp

    def note(**where: Any) -> tuple[int, str]:
        file, path = make(**where)
        made.append(Path(path))
        return file, path

    monkeypatch.setattr(shared_memory.tempfile, "mkstemp", note)
    return made


def test_shared_memory_leaves_no_name_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted_names(monkeypatch)
    with started(model, "prefill") as prefill, started(model, "decode") as decode:
        decode.add("names", prefill.compute_prompt("names"))
        run(prefill, decode, until=(decode, "names"))
    assert made
    assert not any(path.exists() for path in made)


def test_shared_memory_of_a_transfer_is_used_by_the_next_one(
    alone: Running, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = noted_names(monkeypatch)
    with started(model, "prefill") as prefill, started(model, "decode", enable_prefix_caching=False) as decode:
        for number in range(3):
            name = f"again {number}"
            decode.add(name, prefill.compute_prompt(name))
            assert run(prefill, decode, until=(decode, name)) == right(alone, name)
            assert len(made) == 1
            assert not made[0].exists(), "a name is left while the memory is kept"
        assert decode.engine.counters().kv_failed_loads == 0


@pytest.mark.parametrize("kind", ["damage", "cut"])
def test_shared_memory_of_a_failed_transfer_is_not_used_again(
    kind: Kind, alone: Running, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = noted_names(monkeypatch)
    kinds: tuple[Kind, ...] = (kind, "none")
    with started(model, "prefill") as prefill, started(model, "decode", enable_prefix_caching=False) as decode:
        for number, fault in enumerate(kinds):
            undo = Faults(fault, 2).install()
            try:
                name = f"fault {number}"
                decode.add(name, prefill.compute_prompt(name))
                assert run(prefill, decode, until=(decode, name)) == right(alone, name)
            finally:
                undo()
            assert len(made) == number + 1
        assert decode.engine.counters().kv_failed_loads == 1


def test_a_sender_without_the_memory_that_is_offered_sends_over_the_socket(
    alone: Running, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its restart at the same address. The next transfer has new memory."""
    made = noted_names(monkeypatch)
    with started(model, "prefill") as prefill, started(model, "decode", enable_prefix_caching=False) as decode:
        assert prefill.engine.connector is not None
        for number in range(3):
            name = f"dropped {number}"
            decode.add(name, prefill.compute_prompt(name))
            assert run(prefill, decode, until=(decode, name)) == right(alone, name)
            if number == 0:
                prefill.engine.connector._sender._pool.close()
        assert decode.engine.counters().kv_failed_loads == 0
    assert len(made) == 2
    assert not any(path.exists() for path in made)


def test_names_that_killed_processes_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_DIRECTORY", tmp_path)
    old, new, other = (tmp_path / name for name in ("antiphon-kv-old", "antiphon-kv-new", "another"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    shared_memory.forget_stale()
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"role": "decode", "swap_space": 0.0}, "--swap-space"),
        ({"role": "decode", "kv_host": "127.0.0.1"}, "--kv-host"),
        ({"kv_bind": "127.0.0.1"}, "--kv-bind"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        check_engine(EngineSettings(**settings))


def test_an_address_of_another_machine(prefill: Running) -> None:
    memory = prefill.engine._executor.kv_memory()
    with pytest.raises(SettingsError, match="--kv-host"):
        KvConnector(memory, lambda: None, host="192.0.2.1")


@pytest.mark.parametrize("size", [4096, 3 * 4096, 4096 + 24, 100, 0])
def test_a_checksum_tells_every_changed_byte_and_every_other_order(size: int) -> None:
    data = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
    right_one = checksum(data)
    for index in range(0, size, 97):
        data[index] ^= 1
        assert checksum(data) != right_one
        data[index] ^= 1
    assert checksum(data) == right_one
    if size > 4096:
        assert checksum(np.concatenate([data[4096:], data[:4096]])) != right_one
