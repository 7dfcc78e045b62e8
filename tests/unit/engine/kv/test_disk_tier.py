"""Prompts and answers that are read from a disk give the tokens of an engine that computes them, whatever happens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.engine.core.kv.kv_transfer import KvStore
from antiphon.services.engine.kv.disk import tier as tier_module
from antiphon.services.engine.kv.disk.segment import DATA, INDEX, SystemFiles
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import KV_MISSES, KvOrigin
from tests.model.harness import VARIANTS
from tests.models import make_model
from tests.support.slow import slow_but
from tests.unit.engine.kv.engines import END_S, PROMPT, Running, run, started

SAMPLED = {"temperature": 0.9, "seed": 5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: {**VARIANTS, "gemma2": ("gemma2", {"sliding_window": 24})}[name]
    for name in ("llama", "gemma2", "qwen3_5", "lfm2", "deepseek_v2", "gpt_oss", "mamba", "falcon_h1")
}
"""For each form in which KV is cached: plain, with windows, with states, latents."""


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_TIER_TOKENS_MIN", 32)


@contextmanager
def with_disk(model: Path, path: Path, **settings: Any) -> Iterator[Running]:
    with started(model, kv_disk_gb=0.1, kv_disk_path=str(path), **settings) as running:
        yield running


def answer(running: Running, name: str, prompt: tuple[int, ...] = PROMPT, **params: Any) -> list[int]:
    running.add(name, None, prompt, **params)
    return run(running, until=(running, name))


def written(running: Running) -> None:
    """Waits until all that was passed on is on the disk."""
    running.idle()
    tier = running.engine.connector.tier  # type: ignore[union-attr]
    assert tier is not None
    deadline = time.monotonic() + END_S
    while tier._num_held:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def loaded(running: Running) -> int:
    return running.engine.counters().kv_tier_tokens


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("family", slow_but(["llama", "gemma2", "qwen3_5"], list(FAMILIES)))
def test_an_engine_that_starts_again_reads_what_was_computed(family: str, backend: str, tmp_path: Path) -> None:
    name, overrides = FAMILIES[family]
    model = make_model(tmp_path / "model", name, **overrides)
    with with_disk(model, tmp_path / "kv", cpu_backend=backend) as first:
        right = [answer(first, "greedy"), answer(first, "seeded", PROMPT[:70], **SAMPLED)]
        written(first)
        assert loaded(first) == 0
        assert first.engine.counters().kv_stored_tokens >= 96
    with with_disk(model, tmp_path / "kv", cpu_backend=backend) as again:
        assert answer(again, "greedy") == right[0]
        assert loaded(again) == again.cached["greedy"] >= 64
        # The prompt with its answer is the beginning of the next one.
        longer = (*PROMPT, *right[0], *PROMPT[:30])
        found = answer(again, "longer", longer)
        assert answer(again, "seeded", PROMPT[:70], **SAMPLED) == right[1]
        again.idle()
    with started(model, cpu_backend=backend) as alone:
        assert answer(alone, "longer", longer) == found


@pytest.mark.matrix("K-01")
def test_the_engines_of_a_machine_read_what_others_write(model: Path, tmp_path: Path) -> None:
    with with_disk(model, tmp_path) as one, with_disk(model, tmp_path) as other, started(model) as alone:
        right = answer(alone, "right", max_tokens=40)
        # As after the death of `one`: the other engine gets the prompt with the tokens that were accepted.
        assert answer(one, "whole", max_tokens=40) == right
        written(one)
        time.sleep(2 * tier_module._REFRESH_S)
        carried = (*PROMPT, *right[:30])
        assert answer(other, "rest", carried, max_tokens=10) == right[30:]
        assert loaded(other) == 128
        other.idle()


def test_it_is_told_where_the_kv_of_a_prompt_came_from(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_disk(model, tmp_path) as first:
        right = answer(first, "new")
        answer(first, "cached", PROMPT[:70])
        answer(first, "results", PROMPT, prompt_logprobs=1)
        assert first.origins["new"] == KvOrigin(num_computed=100, why="new")
        assert first.origins["cached"] == KvOrigin(num_cached=64, num_computed=6, why="last")
        assert first.origins["results"] == KvOrigin(num_computed=100, why="results")
        written(first)
    with with_disk(model, tmp_path) as small:
        pool = small.engine._core.swap.pool
        taken = pool.allocate(pool.num_free)
        answer(small, "no room")
        pool.free(taken or [])
        assert small.origins["no room"] == KvOrigin(num_computed=100, why="no_room")
    with with_disk(model, tmp_path) as again:
        answer(again, "short", PROMPT[:33])
        answer(again, "both")
        answer(again, "longer", (*PROMPT, *right, *PROMPT))
        assert again.origins["short"] == KvOrigin(num_stored=32, num_computed=1)
        assert again.origins["both"] == KvOrigin(num_cached=32, num_stored=64, num_computed=4)
        assert again.origins["longer"] == KvOrigin(num_cached=96, num_computed=116, why="new")
        computed = dict(zip(KV_MISSES, again.engine.counters().computed_because, strict=True))
        assert (computed["last"], computed["new"]) == (5, 116)
    monkeypatch.setattr(limits, "KV_TIER_TOKENS_MIN", 80)
    with with_disk(model, tmp_path) as again:
        answer(again, "beginning", PROMPT[:33])
        answer(again, "few")
        assert again.origins["few"] == KvOrigin(num_cached=32, num_computed=68, why="short")
    damage(tmp_path, "flip")
    with with_disk(model, tmp_path) as damaged:
        answer(damaged, "damaged")
        found = damaged.origins["damaged"]
        assert (found.why, found.num_stored + found.num_computed) == ("failed", 100)


def test_sequences_with_the_same_prefix_share_a_load_and_others_do_not_wait(model: Path, tmp_path: Path) -> None:
    with with_disk(model, tmp_path) as first:
        right = answer(first, "right")
        written(first)
    with with_disk(model, tmp_path) as again:
        for number in range(5):
            again.add(f"same {number}", None)
        again.add("other", None, PROMPT[50:])
        for number in range(5):
            assert run(again, until=(again, f"same {number}")) == right
        run(again, until=(again, "other"))
        assert loaded(again) == 96
        counters = again.engine.counters()
        assert counters.prompt_tokens == 5 * len(PROMPT) + 50
        again.idle()


def test_nothing_is_read_for_another_tenant_or_another_numeric_type(model: Path, tmp_path: Path) -> None:
    with with_disk(model, tmp_path) as first:
        answer(first, "right")
        written(first)
    with with_disk(model, tmp_path, dtype="bfloat16") as other:
        answer(other, "other type")
        assert loaded(other) == 0
    with with_disk(model, tmp_path) as again:
        from antiphon.services.engine.core.request import SequenceSpec
        from antiphon.shared.parameters.sampling import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        again.engine.add(
            SequenceSpec(sequence_id="tenant", prompt_token_ids=PROMPT, params=params, cache_salt=b"other")
        )
        run(again, until=(again, "tenant"))
        assert loaded(again) == 0


def damage(path: Path, how: str) -> None:
    for file in path.rglob(f"*{INDEX if how == 'index' else DATA}"):
        content = bytearray(file.read_bytes())
        if how == "cut":
            del content[len(content) // 2 :]
        else:
            content[len(content) // 2 + 5] ^= 4
        file.write_bytes(content)


@pytest.mark.matrix("K-03")
@pytest.mark.parametrize("how", ["flip", "cut", "index", "deleted"])
def test_damage_on_the_disk_costs_computing_and_nothing_else(model: Path, tmp_path: Path, how: str) -> None:
    with with_disk(model, tmp_path) as first:
        right = answer(first, "right")
        written(first)
    if how != "deleted":
        damage(tmp_path, how)
    with with_disk(model, tmp_path) as again:
        if how == "deleted":
            for file in tmp_path.rglob(f"*{DATA}"):
                file.write_bytes(b"")
        assert answer(again, "right") == right
        assert loaded(again) < 96
        again.idle()
        # What was damaged is written anew.
        assert answer(again, "again", (*PROMPT, *right)) is not None


class Stuck(SystemFiles):
    """A disk that does not answer."""

    stuck = False

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        while type(self).stuck and len(buffer) > 4096:
            time.sleep(0.01)
        return super().read_into(file, buffer, offset)


@pytest.mark.matrix("K-02")
def test_a_disk_that_hangs_is_not_waited_for(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_SILENCE_S", 0.2)
    with with_disk(model, tmp_path) as first:
        right = answer(first, "right")
        written(first)
    monkeypatch.setattr(tier_module.DiskTier.__init__, "__defaults__", (Stuck(),))
    with with_disk(model, tmp_path) as again:
        Stuck.stuck = True
        try:
            assert answer(again, "right") == right
            assert loaded(again) == 0
            again.idle()
        finally:
            Stuck.stuck = False


def test_a_writer_that_cannot_keep_up_gives_blocks_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_STORES_MAX", 0)
    with with_disk(model, tmp_path) as running:
        answer(running, "right")
        running.idle()
        assert not list(tmp_path.rglob(f"*{DATA}"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_disk_path": "/somewhere"}, "--kv-disk-path: nothing is written there"),
        ({"kv_disk_gb": 1.0, "swap_space": 0}, "--swap-space: KV from the disk"),
        ({"kv_disk_gb": 1.0, "enable_prefix_caching": False}, r"--kv-disk-gb: .* prefix cache"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_engine(EngineSettings(model="x", **settings))


def test_a_directory_that_cannot_be_used_is_told_of(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"--kv-disk-path: .* cannot be used"), with_disk(model, tmp_path / "file"):
        pass


def test_a_writer_without_rest_still_finds_what_others_write(model: Path, tmp_path: Path) -> None:
    with with_disk(model, tmp_path) as one, with_disk(model, tmp_path) as other:
        right = answer(one, "right")
        written(one)
        tier, given_back = other.engine.connector.tier, list[int]()  # type: ignore[union-attr]
        assert tier is not None
        tier._release = given_back.extend
        name, deadline = next(iter(one.engine.connector.tier.store._places)), time.monotonic() + END_S  # type: ignore[union-attr]
        while name not in tier:
            # Orders that leave it no time, of a block that nobody computes.
            assert time.monotonic() < deadline
            tier.take(KvStore((b"busy",), (0,)))
            time.sleep(0.001)
        tier._release = other.engine.connector._release  # type: ignore[union-attr]
        assert answer(other, "again") == right


def test_a_block_that_cannot_be_copied_is_given_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> int:
        raise RuntimeError("no memory")

    with with_disk(model, tmp_path) as running:
        monkeypatch.setattr(running.engine.connector.tier, "_copy_out", fails)  # type: ignore[union-attr]
        answer(running, "right")
        running.idle()
        monkeypatch.undo()
        monkeypatch.setattr(limits, "KV_TIER_TOKENS_MIN", 32)
        right = answer(running, "other", PROMPT[1:])
        written(running)
    assert "a block of KV is not written to the disk" in caplog.text
    with with_disk(model, tmp_path) as again:
        assert answer(again, "other", PROMPT[1:]) == right
        assert loaded(again) == 96
