"""Prompts of the standard loads: exactly as long as asked, new with each seed, with the shared part in common."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from bench.harness.loads import LOADS, Load, Prompts, chosen

DEMO = Path(__file__).resolve().parents[3] / "antiphon" / "demo"


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(DEMO)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_every_prompt_has_exactly_the_tokens_asked_for(prompts: Prompts, load: Load) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    draw = prompts.draw(load, seed=1)
    assert [len(draw.prime), len(draw.warmup), len(draw.measured)] == [load.shared > 0, load.warmup, load.requests]
    for prompt in draw.prime + draw.warmup + draw.measured:
        assert len(prompt.token_ids) == load.prompt_length
        assert tokenizer.encode(prompt.text).ids == prompt.token_ids


def test_no_two_prompts_are_equal_and_another_seed_gives_others(prompts: Prompts) -> None:
    first, again, other = (prompts.draw(LOADS[1], seed) for seed in (1, 1, 2))
    assert first == again
    texts = [prompt.text for draw in (first, other) for prompt in draw.warmup + draw.measured]
    assert len(set(texts)) == len(texts)


def test_a_shared_prefix_is_the_same_within_a_seed_and_another_one_with_the_next(prompts: Prompts) -> None:
    load = LOADS[3]

    def fronts(seed: int) -> set[tuple[int, ...]]:
        draw = prompts.draw(load, seed)
        return {tuple(p.token_ids[: load.shared]) for p in draw.prime + draw.warmup + draw.measured}

    assert len(fronts(1)) == 1
    assert fronts(1) != fronts(2)


def test_a_short_load_is_one_wave() -> None:
    assert [(load.requests, load.warmup) for load in chosen(["c8", "c32"], short=True)] == [(8, 1), (32, 1)]


def test_a_tokenizer_without_plain_words_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SystemExit, match="only 0 words of one token"):
        Prompts(tmp_path)
