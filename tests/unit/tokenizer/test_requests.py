from typing import Any

import msgspec
import pytest

from antiphon.services.tokenizer.requests import check_model, check_request, detokenize, num_characters, tokenize
from antiphon.shared import limits
from antiphon.shared.blocks import chain_hashes, split_hashes
from antiphon.shared.codec import pack_ids, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage, DetokenizeReply, DetokenizeRequest, ImageTokens, TokenizeRequest
from antiphon.shared.request.images import plain_places
from antiphon.shared.text.codec import Codec
from antiphon.shared.text.templates.turns import plain_messages
from tests.tokenizer_files import byte_level, token_id

CODEC = Codec(byte_level())
USER = (ChatMessage(role="user", content="hello"),)


def ids_of(text: str) -> list[int]:
    return CODEC.encode([text], add_special_tokens=False)[0]


def test_a_batch_gives_one_item_for_each_prompt_in_order() -> None:
    reply = tokenize(CODEC, TokenizeRequest(request_id="r", model="m"), ("one", "", "two"))
    assert [unpack_ids(prompt.token_ids) for prompt in reply.prompts] == [ids_of("one"), [], ids_of("two")]
    assert all(prompt.block_hashes == b"" and prompt.tokens == () for prompt in reply.prompts)


def test_block_hashes_chain_over_full_blocks_under_the_salt() -> None:
    request = TokenizeRequest(request_id="r", model="m", block_size=4, cache_salt=b"tenant")
    (prompt,) = tokenize(CODEC, request, ("a rather long sentence of words",)).prompts
    assert prompt.block_hashes == chain_hashes(prompt.token_ids, 4, b"tenant")
    assert len(prompt.block_hashes) // 16 == len(prompt.token_ids) // 16


def test_a_text_that_is_pooled_keeps_its_first_tokens() -> None:
    request = TokenizeRequest(
        request_id="r", model="m", prompts=("hello you",), max_model_len=4, truncate_prompt_tokens=4, generates=False
    )
    (prompt,) = tokenize(CODEC, request, request.prompts).prompts
    assert unpack_ids(prompt.token_ids) == ids_of("hello you")[:4]


def test_each_token_is_returned_as_the_vocabulary_writes_it_when_asked_for() -> None:
    (prompt,) = tokenize(CODEC, TokenizeRequest(request_id="r", model="m", return_tokens=True), ("one voice",)).prompts
    assert "".join(prompt.tokens) == "oneĠvoice"
    assert len(prompt.tokens) == len(prompt.token_ids) // 4


@pytest.mark.parametrize(("max_tokens", "fits"), [(0, True), (1, True), (5, True), (6, False), (2**31, False)])
def test_prompt_and_output_must_fit_the_context(max_tokens: int, fits: bool) -> None:
    count = len(ids_of("hello you"))
    request = TokenizeRequest(
        request_id="r", model="m", prompts=("hello you",), max_model_len=count + 5, max_tokens=max_tokens
    )
    if fits:
        assert tokenize(CODEC, request, request.prompts)
        return
    with pytest.raises(ServiceError) as error:
        tokenize(CODEC, request, request.prompts)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
    assert error.value.message == (
        f"This model's maximum context length is {count + 5} tokens. However, you requested {count + max_tokens} "
        f"tokens ({count} in the prompt, {max_tokens} in the completion). "
        "Please reduce the length of the prompt or completion."
    )


def test_a_prompt_that_leaves_no_room_is_refused_even_without_max_tokens() -> None:
    count = len(ids_of("hello"))
    request = TokenizeRequest(request_id="r", model="m", messages=USER, max_model_len=count)
    with pytest.raises(ServiceError, match=f"your messages resulted in {count} tokens") as error:
        tokenize(CODEC, request, ("hello",))
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


def test_without_a_context_length_nothing_is_checked() -> None:
    assert tokenize(CODEC, TokenizeRequest(request_id="r", model="m", max_tokens=2**31), ("hello",))


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (TokenizeRequest(request_id="r", model="m"), "missing_required_parameter", "prompt"),
        (
            TokenizeRequest(request_id="r", model="m", prompts=("a",), messages=USER),
            "missing_required_parameter",
            "messages",
        ),
        (
            TokenizeRequest(request_id="r", model="m", prompts=("a",) * (limits.PROMPTS_MAX + 1)),
            "request_too_large",
            "prompt",
        ),
        (
            TokenizeRequest(request_id="r", model="m", messages=USER * (limits.MESSAGES_MAX + 1)),
            "request_too_large",
            "messages",
        ),
        (
            TokenizeRequest(request_id="r", model="m", prompts=("a" * limits.PROMPT_CHARS_MAX, "b")),
            "request_too_large",
            "prompt",
        ),
    ],
)
def test_a_request_without_text_or_with_too_much_is_refused(request_: TokenizeRequest, code: str, param: str) -> None:
    with pytest.raises(ServiceError) as error:
        check_request(request_)
    assert (error.value.code, error.value.param) == (code, param)


def test_another_model_than_the_pools_is_not_found() -> None:
    check_model("mine", "mine")
    check_model("", "mine")
    with pytest.raises(ServiceError) as error:
        check_model("other", "mine")
    assert (error.value.code, error.value.param, error.value.status) == ("model_not_found", "model", 404)


@pytest.mark.spec("S-API-041")
def test_a_pre_tokenised_turn_is_decoded_for_the_template() -> None:
    packed = pack_ids([*ids_of("zażółć"), token_id(byte_level(), "<|end|>")])
    messages = (
        ChatMessage(role="user", content="", token_ids=packed),
        ChatMessage(role="assistant", content="ok", name="Ann"),
    )
    assert plain_messages(CODEC, messages) == [
        {"role": "user", "content": "zażółć<|end|>"},
        {"role": "assistant", "content": "ok", "name": "Ann"},
    ]


@pytest.mark.parametrize(
    ("content", "fields", "has_thinking"),
    [("", {"tool_calls": []}, True), ("Hm.", {"tool_calls": []}, False), ("Hm.", {}, True)],
)
def test_templates_that_call_the_reasoning_thinking_get_it(
    content: str, fields: dict[str, Any], has_thinking: bool
) -> None:
    packed = msgspec.json.encode({"reasoning": "a", "reasoning_content": "a", **fields})
    [plain] = plain_messages(CODEC, (ChatMessage(role="assistant", content=content, fields=packed),))
    assert plain.get("thinking") == ("a" if has_thinking else None)


@pytest.mark.parametrize("packed", [pack_ids([10**6]), b"odd"])
def test_ids_outside_the_vocabulary_are_refused_by_name(packed: bytes) -> None:
    with pytest.raises(ServiceError) as chat:
        plain_messages(CODEC, (ChatMessage(role="user", content="", token_ids=packed),))
    with pytest.raises(ServiceError) as tokens:
        detokenize(CODEC, DetokenizeRequest("r", "m", packed))
    assert (chat.value.code, chat.value.param) == ("invalid_value", "messages")
    assert (tokens.value.code, tokens.value.param) == ("invalid_value", "tokens")


def test_detokenizing_keeps_special_tokens() -> None:
    packed = pack_ids([*ids_of("é"), token_id(byte_level(), "<|end|>")])
    assert detokenize(CODEC, DetokenizeRequest("r", "m", packed)) == DetokenizeReply("r", "é<|end|>")
    assert detokenize(CODEC, DetokenizeRequest("r", "m", packed, True)).tokens[-1] == "<|end|>"


@pytest.mark.parametrize(("keep", "kept"), [(0, None), (2, 2), (-1, 4), (100, None)])
def test_a_prompt_is_truncated_to_its_last_tokens_before_it_is_checked(keep: int, kept: int | None) -> None:
    ids = ids_of("a rather long sentence of words")
    room = 4 if keep == -1 else len(ids)
    request = TokenizeRequest(
        request_id="r", model="m", max_model_len=room + 3, max_tokens=3, block_size=2, truncate_prompt_tokens=keep
    )
    (prompt,) = tokenize(CODEC, request, ("a rather long sentence of words",)).prompts
    assert unpack_ids(prompt.token_ids) == (ids if kept is None else ids[-kept:])
    assert prompt.block_hashes == chain_hashes(prompt.token_ids, 2, b"")


def test_a_suffix_counts_once_for_each_prompt() -> None:
    request = TokenizeRequest(request_id="r", model="m", prompts=("ab", "c"), suffix="xyz")
    assert num_characters(request) == 9
    with pytest.raises(ServiceError, match="longer than"):
        check_request(
            TokenizeRequest(request_id="r", model="m", prompts=("a",) * 3, suffix="x" * (limits.PROMPT_CHARS_MAX // 3))
        )


def test_prompts_with_a_suffix_have_the_tokens_that_end_a_filled_in_text() -> None:
    tokenizer = byte_level()
    names = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    tokenizer.add_special_tokens(names)
    codec = Codec(tokenizer)
    request = TokenizeRequest(request_id="r", model="m", prompts=("ab",), suffix="c", add_special_tokens=False)
    reply = tokenize(codec, request, request.prompts)
    assert reply.end_token_ids == (tokenizer.token_to_id("▁<EOT>"),)
    assert unpack_ids(reply.prompts[0].token_ids)[0] == tokenizer.token_to_id("▁<PRE>")
    assert tokenize(codec, TokenizeRequest(request_id="r", model="m", prompts=("ab",)), ("ab",)).end_token_ids == ()


def test_a_image_counts_as_its_tokens_and_changes_the_hashes_from_its_block_on() -> None:
    place = ids_of("x")[0]
    text, prompts = "qxwxq", []
    for key in (b"one", b"two"):
        images = (
            ImageTokens(token_id=place, num_tokens=3, key=b"same"),
            ImageTokens(token_id=place, num_tokens=2, key=key),
        )
        request = TokenizeRequest(request_id="r", model="m", block_size=2, images=images)
        prompts += tokenize(CODEC, request, (text,)).prompts
    first, second = prompts
    assert unpack_ids(first.token_ids) == [*ids_of("q"), *[place] * 3, *ids_of("w"), place, place, *ids_of("q")]
    assert first.image_starts == second.image_starts == (1, 5)
    hashes = [split_hashes(each.block_hashes) for each in prompts]
    assert [left == right for left, right in zip(*hashes, strict=True)] == [True, True, False, False]
    plain = split_hashes(chain_hashes(first.token_ids, 2))
    assert [left == right for left, right in zip(hashes[0], plain, strict=True)] == [False, False, False, False]


def test_the_place_of_a_image_becomes_the_text_around_its_token_before_it_is_tokenized() -> None:
    token = ids_of("x")[0]
    images = tuple(
        ImageTokens(token_id=token, num_tokens=number, key=b"key", place="@@", text="\n\nax\n\n") for number in (3, 2)
    )
    (prompt,) = tokenize(CODEC, TokenizeRequest(request_id="r", model="m", images=images), ("q@@\n@@w",)).prompts
    found, starts = unpack_ids(prompt.token_ids), prompt.image_starts
    whole = ids_of("q\n\nax\n\n\n\n\nax\n\nw")
    first = whole.index(token)
    second = whole.index(token, first + 1)
    assert starts == (first, second + 2)
    assert list(found) == [*whole[:first], *[token] * 3, *whole[first + 1 : second], token, token, *whole[second + 1 :]]
    with pytest.raises(ServiceError, match="has 1 places for 2 images"):
        tokenize(CODEC, TokenizeRequest(request_id="r", model="m", images=images), ("q@@",))
    with pytest.raises(ServiceError, match="has 3 places for 2 images"):
        tokenize(CODEC, TokenizeRequest(request_id="r", model="m", images=images), ("q@@x@@",))


def test_a_image_may_have_other_tokens_between_its_own() -> None:
    token, end = ids_of("x")[0], ids_of("y")[0]
    layout = [token, token, end, token, token, end]
    images = (
        ImageTokens(token_id=token, num_tokens=6, key=b"key", layout=pack_ids(layout)),
        ImageTokens(token_id=token, num_tokens=1, key=b"other"),
    )
    (prompt,) = tokenize(CODEC, TokenizeRequest(request_id="r", model="m", images=images), ("qxwx",)).prompts
    assert list(unpack_ids(prompt.token_ids)) == [*ids_of("q"), *layout, *ids_of("w"), token]
    assert prompt.image_starts == (1, 8)
    assert plain_places(images[0].layout, token) == (2, 5)


def test_a_prompt_needs_one_place_for_each_image() -> None:
    request = TokenizeRequest(
        request_id="r", model="m", images=(ImageTokens(token_id=ids_of("x")[0], num_tokens=3, key=b"key"),)
    )
    with pytest.raises(ServiceError, match="has 2 places for 1 images"):
        tokenize(CODEC, request, ("qxwx",))
