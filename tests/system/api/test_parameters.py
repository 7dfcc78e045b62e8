"""What each field of a request does to the answer."""

import asyncio
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.system.api.asking import CONTEXT, HELLO, PROMPT, chat, complete, refused, texts, usage
from tests.system.served import Served

pytestmark = [pytest.mark.system, pytest.mark.nats]
WILD = {"temperature": 2, "seed": 1, "n": 16, "max_tokens": 100}
"""Sixteen choices at random: some get to an end token."""


def tokens(client: openai.OpenAI, *prompts: str, **fields: Any) -> list[list[str]]:
    """64 greedy tokens after each prompt."""
    asked = {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "logprobs": 0, **fields}
    logprobs = [choice.logprobs for choice in complete(client, list(prompts), **asked).choices]
    return [one.tokens for one in logprobs if one and one.tokens]


def repeats(client: openai.OpenAI, **fields: Any) -> int:
    """Tokens that had been generated before, over three prompts."""
    return sum(len(answer) - len(set(answer)) for answer in tokens(client, PROMPT, "the", "A", **fields))


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-001", "S-API-011")
def test_a_prompt_in_each_of_its_four_forms_gets_the_same_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(text).ids for text in (PROMPT, "the")]
    alone = [texts(complete(client, text, temperature=0))[0] for text in (PROMPT, "the")]
    assert alone[0] != alone[1]
    assert texts(complete(client, ids[0], temperature=0)) == alone[:1]
    assert texts(complete(client, [PROMPT, "the"], temperature=0)) == alone
    assert texts(complete(client, ids, temperature=0)) == alone


@pytest.mark.spec("S-API-011", "S-API-027")
def test_the_choices_of_a_batch_are_in_the_order_of_its_prompts(client: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 5, "max_tokens": 4, "echo": True}
    batch = complete(client, ["one", "two"], **asked)
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert texts(batch) == texts(complete(client, "one", **asked)) + texts(complete(client, "two", **asked))
    assert [text[:3] for text in texts(batch)] == ["one"] * 3 + ["two"] * 3


@pytest.mark.spec("S-API-027")
def test_an_echo_stands_before_the_answer_of_both_endpoints_only_when_asked_for(client: openai.OpenAI) -> None:
    plain, echo = (complete(client, temperature=0, echo=echo).choices[0].text for echo in (False, True))
    assert echo == PROMPT + plain
    assert complete(client, temperature=0).choices[0].text == plain
    said = [chat(client, temperature=0, max_tokens=8, echo=echo).choices[0].message.content for echo in (False, True)]
    assert said[1] == f"Hello{said[0]}"


@pytest.mark.spec("S-API-028")
def test_a_suffix_is_refused(client: openai.OpenAI) -> None:
    refused(client, "suffix", suffix=" the end")
    assert complete(client, suffix=None, max_tokens=1).choices


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-013", "S-API-059")
def test_max_tokens_is_the_most_that_is_generated(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    room = CONTEXT - len(tokenizer.encode(PROMPT).ids)
    for count in (1, 5, room):
        answer = complete(client, max_tokens=count, ignore_eos=True)
        assert usage(answer)[1] == count
        assert answer.choices[0].finish_reason == "length"
    refused(client, "max_tokens", max_tokens=0)
    refused(client, "max_tokens", max_tokens=CONTEXT + 1)
    with pytest.raises(openai.BadRequestError, match="context") as error:
        complete(client, max_tokens=room + 1)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.spec("S-API-013", "S-SRV-032", "S-API-059")
def test_without_max_tokens_a_completion_has_16_and_a_chat_fills_the_context(client: openai.OpenAI) -> None:
    assert usage(complete(client, ignore_eos=True))[1] == 16
    answer = chat(client, ignore_eos=True)
    assert sum(usage(answer)) == CONTEXT
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.spec("S-API-014")
def test_nothing_ends_an_answer_before_min_tokens(
    client: openai.OpenAI, tokenizer: Tokenizer, greedy: list[int]
) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    for stop in ({"stop_token_ids": greedy[:2]}, {"stop": tokenizer.decode(greedy[:1])}):
        assert usage(complete(client, **asked, **stop))[1] == 1
        assert 12 <= usage(complete(client, min_tokens=12, **asked, **stop))[1] <= 20
    ends = usage(complete(client, **WILD))[1]
    assert ends < 1600
    assert usage(complete(client, min_tokens=100, **WILD))[1] == 1600
    refused(client, "min_tokens", min_tokens=9, max_tokens=8)
    refused(client, "min_tokens", min_tokens=-1)


# --- how tokens are chosen --------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-015:sampling")
def test_temperature_0_gives_what_transformers_generates_greedily(
    client: openai.OpenAI, tokenizer: Tokenizer, greedy: list[int]
) -> None:
    answers = [complete(client, temperature=0, max_tokens=32, ignore_eos=True) for _ in range(2)]
    assert [answer.choices[0].text for answer in answers] == [tokenizer.decode(greedy)] * 2
    said = chat(client, temperature=0, max_tokens=8, logprobs=True).choices[0]
    assert said.logprobs is not None
    assert said.logprobs.content is not None
    heard = [bytes(token.bytes or ()) for token in said.logprobs.content]
    assert b"".join(heard).decode(errors="replace") == said.message.content


@pytest.mark.spec("S-API-016", "S-API-017")
@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.5, "temperature": 2}])
def test_one_candidate_is_the_greedy_one(
    client: openai.OpenAI, tokenizer: Tokenizer, greedy: list[int], fields: dict[str, Any]
) -> None:
    answer = complete(client, max_tokens=32, ignore_eos=True, **fields)
    assert answer.choices[0].text == tokenizer.decode(greedy)


@pytest.mark.spec("S-API-015:sampling", "S-API-016", "S-API-017", "S-API-018", "S-API-022", "S-API-023", "S-API-024")
def test_what_is_left_out_has_its_default(client: openai.OpenAI) -> None:
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "n": 1}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    bare = complete(client, seed=7)
    assert texts(bare) == texts(complete(client, seed=7, **neutral))
    for changed in ({"temperature": 0.5}, {"top_p": 0.3}, {"top_k": 3}):
        assert texts(bare) != texts(complete(client, seed=7, **changed))


@pytest.mark.spec("S-API-015:sampling", "S-API-016", "S-API-017", "S-API-022", "S-API-023", "S-API-024", "S-API-058")
@pytest.mark.parametrize(
    ("name", "fine", "bad"),
    [
        ("temperature", (0, 2.0), (-0.1, 2.1)),
        ("top_p", (0.01, 1.0), (0, 1.1, -0.5)),
        ("top_k", (-1, 0, 1, 1000), (-2,)),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1)),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1)),
        ("repetition_penalty", (0.1, 2.0), (0, 2.1, -1)),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(
    client: openai.OpenAI, name: str, fine: tuple[float, ...], bad: tuple[float, ...]
) -> None:
    for value in fine:
        assert complete(client, max_tokens=1, **{name: value}).choices
    for value in bad:
        refused(client, name, **{name: value})


@pytest.mark.spec("S-API-022", "S-API-023", "S-API-024")
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_lowers_repetition_and_its_opposite_raises_it(client: openai.OpenAI, name: str) -> None:
    opposite = 0.5 if name == "repetition_penalty" else -2.0
    fewer, plain, more = (repeats(client, **fields) for fields in ({name: 2.0}, {}, {name: opposite}))
    assert fewer < 0.7 * plain
    assert more > 1.1 * plain


@pytest.mark.spec("S-API-023")
def test_frequency_counts_each_time_where_presence_counts_once(client: openai.OpenAI) -> None:
    [presence], [frequency] = (tokens(client, PROMPT, **{f"{name}_penalty": 1.0}) for name in ("presence", "frequency"))
    differ = next(i for i, pair in enumerate(zip(presence, frequency, strict=True)) if pair[0] != pair[1])
    counts = [presence[:differ].count(token) for token in set(presence[:differ])]
    assert max(counts) > 1


@pytest.mark.spec("S-API-018", "S-API-050")
def test_n_choices_differ_and_need_sampling(client: openai.OpenAI) -> None:
    assert len(complete(client).choices) == 1
    answer = complete(client, n=10, seed=3, ignore_eos=True)
    assert len(set(texts(answer))) == 10
    assert usage(answer)[1] == 10 * 16
    said = chat(client, n=3, max_tokens=8)
    assert len({choice.message.content for choice in said.choices}) == 3
    for fields in ({"temperature": 0}, {"top_k": 1}, {}):
        refused(client, "n", n=2 if fields else 0, **fields)


@pytest.mark.spec("S-API-057")
def test_best_of_is_not_less_than_n(client: openai.OpenAI) -> None:
    refused(client, "best_of", n=3, best_of=2)
    assert len(complete(client, n=2, best_of=2, max_tokens=1).choices) == 2


@pytest.mark.spec("S-API-029")
async def test_a_seed_gives_the_same_answer_alone_and_under_load(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=60) as client:

        async def ask(seed: int | None, prompt: str = PROMPT) -> str:
            done = await client.completions.create(model="model", prompt=prompt, seed=seed, max_tokens=12)
            return done.choices[0].text

        alone = [await ask(seed) for seed in range(4)]
        load = [ask(None, f"{n} other requests") for n in range(24)]
        busy = await asyncio.gather(*load[:12], *(ask(seed) for seed in range(4)), *load[12:])
        assert list(busy[12:16]) == alone
        assert len(set(alone)) == 4
        assert await ask(None) != await ask(None)


# --- where it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-030")
def test_the_text_ends_before_a_stop_string(client: openai.OpenAI, tokenizer: Tokenizer, greedy: list[int]) -> None:
    whole = tokenizer.decode(greedy)
    asked = {"temperature": 0, "max_tokens": 32}
    for stop in (whole[6:9], [whole[6:9]], ["never said", whole[6:9], whole[15:17]]):
        choice = complete(client, stop=stop, **asked).choices[0]
        assert choice.text == whole[: whole.index(whole[6:9])]
        assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == ("stop", whole[6:9])
    assert complete(client, stop=None, **asked).choices[0].text == whole
    said = chat(client, **asked).choices[0].message.content
    assert said is not None
    assert chat(client, stop=said[4:6], **asked).choices[0].message.content == said[: said.index(said[4:6])]


@pytest.mark.spec("S-API-031")
def test_a_stop_token_is_part_of_the_text_unless_it_is_special(
    client: openai.OpenAI, tokenizer: Tokenizer, greedy: list[int]
) -> None:
    end = greedy.index(greedy[5])
    choice = complete(client, temperature=0, stop_token_ids=[greedy[5]]).choices[0]
    assert choice.text == tokenizer.decode(greedy[: end + 1])
    assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == ("stop", greedy[5])
    special = tokenizer.token_to_id("<|im_start|>")
    ended = [c for c in complete(client, stop_token_ids=[special], **WILD).choices if c.to_dict()["stop_reason"]]
    assert {(choice.finish_reason, choice.to_dict()["stop_reason"]) for choice in ended} == {("stop", special)}
    assert not any(choice.text.endswith("<|im_start|>") for choice in ended)


@pytest.mark.spec("S-API-033")
def test_ignore_eos_goes_on_to_max_tokens_but_for_explicit_stops(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    usual, ignoring = complete(client, **WILD), complete(client, ignore_eos=True, **WILD)
    assert texts(complete(client, ignore_eos=False, **WILD)) == texts(usual)
    assert {choice.finish_reason for choice in ignoring.choices} == {"length"}
    ended = [i for i, choice in enumerate(usual.choices) if choice.finish_reason == "stop"]
    assert ended
    for i in ended:
        assert ignoring.choices[i].text.startswith(usual.choices[i].text)
        assert len(ignoring.choices[i].text) > len(usual.choices[i].text)
    eos = tokenizer.token_to_id("<|im_end|>")
    assert texts(complete(client, ignore_eos=True, stop_token_ids=[eos], **WILD)) == texts(usual)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S-API-026", "S-API-056")
def test_completions_report_the_likeliest_tokens_up_to_five(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=1).choices[0].logprobs is None
    for count in (0, 1, 5):
        logprobs = complete(client, temperature=0, max_tokens=20, logprobs=count).choices[0].logprobs
        assert logprobs is not None
        tops, chosen = logprobs.top_logprobs or [], logprobs.token_logprobs or []
        assert len(tops) == len(chosen) == len(logprobs.tokens or []) == 20
        # The chosen token is always there. Parts of characters share a text, so a position may have fewer.
        assert max(map(len, tops)) == max(1, count)
        for top, logprob in zip(tops, chosen, strict=True):
            assert max(top.values()) == logprob < 0
    for count in (-1, 6):
        refused(client, "logprobs", logprobs=count)


@pytest.mark.spec("S-API-026")
def test_chat_reports_them_in_its_own_shape(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=1).choices[0].logprobs is None
    for fields in ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}):
        logprobs = chat(client, temperature=0, max_tokens=6, **fields).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 6
        for token in logprobs.content:
            assert token.logprob == token.top_logprobs[0].logprob
            ordered = [top.logprob for top in token.top_logprobs]
            assert ordered == sorted(ordered, reverse=True)
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(client, top_logprobs=3)


@pytest.mark.spec("S-API-036")
def test_the_user_field_changes_nothing(client: openai.OpenAI) -> None:
    assert texts(complete(client, seed=1)) == texts(complete(client, seed=1, user="somebody"))
    assert chat(client, max_tokens=2, user="somebody").choices


@pytest.mark.spec("S-API-012", "S-API-042")
def test_a_conversation_is_continued_after_all_its_turns_in_order(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    contents = ("Translate.", "water", "eau", "bread")
    turns = [
        {"role": role, "content": content}
        for role, content in zip(("system", "user", "assistant", "user"), contents, strict=True)
    ]
    written = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    prompt = tokenizer.encode(written + "<|im_start|>assistant\n").ids
    asked = {"temperature": 0, "max_tokens": 12}
    answer = chat(client, turns, **asked)
    assert answer.choices[0].message.content == complete(client, prompt, **asked).choices[0].text
    assert usage(answer)[0] == len(prompt)
    with pytest.raises(openai.BadRequestError) as missing:
        client.post("/chat/completions", body={"model": "model"}, cast_to=object)
    assert missing.value.param == "messages"


@pytest.mark.spec("S-API-040")
def test_roles_are_system_user_and_assistant_and_system_may_stand_anywhere(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "Be brief."}
    for right in ([system, *HELLO], [*HELLO, system], [system, system, *HELLO]):
        assert chat(client, right, max_tokens=1).choices
    for wrong in ([{"role": "User", "content": "Hello"}], [{"role": "x"}]):
        with pytest.raises(openai.BadRequestError, match="role") as error:
            chat(client, wrong)
        assert str(error.value.param).endswith("].role")


@pytest.mark.spec("S-API-041")
def test_content_may_be_token_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = [{"role": "user", "content": tokenizer.encode("Hello").ids}]
    said = [chat(client, messages, temperature=0, max_tokens=12) for messages in (HELLO, ids)]
    assert said[0].choices[0].message.content == said[1].choices[0].message.content
    assert usage(said[0]) == usage(said[1])
