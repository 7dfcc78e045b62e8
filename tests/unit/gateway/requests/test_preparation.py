"""How prompts become token ids before a request is placed."""

import contextlib
import json
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest
from msgspec.structs import replace

from antiphon.services.gateway.edge.access.call import Call
from antiphon.services.gateway.path.generation import (
    Caller,
    Client,
    GenerationRequest,
    Origin,
    OutputText,
    PendingParams,
    PromptInputs,
    ThinkingLimit,
)
from antiphon.services.gateway.path.messages import Prompt, RequestMessages
from antiphon.services.gateway.path.requests.preparation import prepare, tokenize
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.codec import pack_ids, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage, TokenizedPrompt, TokenizeReply, TokenizeRequest
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.unit.gateway.bodies import CARD


class Tokenizers:
    """Answers with one token for each character. `asked` has the requests."""

    def __init__(self) -> None:
        self.asked: list[TokenizeRequest] = []

    async def tokenizer(
        self, message: TokenizeRequest, size: int, headers: Any, on_silent: Any = None
    ) -> TokenizeReply:
        self.asked.append(message)
        texts = message.prompts or ("".join(one.content for one in message.messages),)
        found = tuple(TokenizedPrompt(token_ids=pack_ids([ord(letter) for letter in text])) for text in texts)
        marks = tuple(pack_ids([ord(letter) for letter in mark]) for mark in message.marks)
        return TokenizeReply(
            request_id=message.request_id, prompts=found, end_token_ids=(9,) if message.suffix else (), marks=marks
        )


REQUEST = GenerationRequest(request_id="r" * 22, model=CARD.name, params=SamplingParams(max_tokens=4))


def request(n: int = 1, **inputs: Any) -> GenerationRequest:
    return replace(REQUEST, n=n, inputs=PromptInputs(**inputs))


async def prepared(asked: GenerationRequest, tokenizers: Tokenizers | None = None) -> list[Prompt]:
    return (await tokenize(cast(ServiceClients, tokenizers or Tokenizers()), asked, CARD, 0)).prompts


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_the_marks_of_reasoning_become_token_ids(max_tokens: int):
    limit = ThinkingLimit(budget=7, opening="<", closing="/>", begins_inside=lambda tail: tail == "")
    params = SamplingParams(max_tokens=max_tokens)
    said = request(messages=(ChatMessage(role="user", content="a"),))
    asked = replace(said, pending=PendingParams(thinking=limit), params=params)
    found = await tokenize(cast(ServiceClients, Tokenizers()), asked, CARD, 0)
    thinking = ThinkingBudget(budget=7, opening=(60,), closing=(47, 62), inside=True)
    assert found.params == msgspec.structs.replace(params, thinking=thinking)


async def test_marks_that_are_no_tokens_are_refused():
    for closing in ("", "x" * (limits.THINKING_MARK_TOKENS_MAX + 1), "\u1000"):
        limit = ThinkingLimit(budget=7, opening="<", closing=closing, begins_inside=bool)
        said = request(messages=(ChatMessage(role="user", content="a"),))
        asked = replace(said, pending=PendingParams(thinking=limit))
        with pytest.raises(ServiceError) as error:
            await tokenize(cast(ServiceClients, Tokenizers()), asked, CARD, 0)
        assert error.value.param == "thinking_token_budget"


async def test_each_conversation_is_rendered_by_itself_and_in_order():
    tokenizers = Tokenizers()
    conversations = tuple((ChatMessage(role="user", content=text),) for text in ("a", "bc"))
    prompts = await prepared(request(conversations=conversations), tokenizers)
    assert [unpack_ids(prompt.packed) for prompt in prompts] == [[97], [98, 99]]
    assert [message.messages for message in tokenizers.asked] == list(conversations)


async def test_what_a_grammar_does_without_is_told_in_the_names_of_the_request():
    params = SamplingParams(max_tokens=4, grammar=Grammar("json", "{}"))
    pending = PendingParams(grammar_param="tools[].function.parameters", grammar_ignored=("not", "if"))
    call = Call()
    await prepared(replace(request(texts=("a",)), params=params, pending=pending, origin=Origin(caller=call)))
    assert [*call.ignored] == ["tools[].function.parameters.not", "tools[].function.parameters.if"]


async def test_the_copies_of_a_grammar_are_bounded_together():
    long = Grammar("json", json.dumps({"enum": ["x" * 50_000] * 5}))
    asked = replace(request(texts=("a", "b"), n=128), params=SamplingParams(max_tokens=4, grammar=long))
    await prepared(asked)
    pending = PendingParams(grammar_param="guided_json")
    with pytest.raises(ServiceError) as refused:
        await prepared(replace(asked, inputs=PromptInputs(texts=("a", "b", "c")), pending=pending))
    assert refused.value.param == "guided_json"
    assert "384 outputs" in refused.value.message


FAR_TOO_LONG = limits.TEXT_BYTES_ANY + 1
assert CARD.max_model_len * limits.TEXT_BYTES_PER_TOKEN < limits.TEXT_BYTES_ANY


def _turn(size: int) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content="a" * (size // 2), fields=b"x" * (size - size // 2)),)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"texts": ("a", "a" * FAR_TOO_LONG), "names": ("p[0]", "p[1]")}, "context_length_exceeded", "p[1]"),
        ({"texts": ("é" * (FAR_TOO_LONG // 2 + 1),)}, "context_length_exceeded", "prompt"),
        ({"texts": ("a",), "suffix": "a" * FAR_TOO_LONG}, "context_length_exceeded", "prompt"),
        ({"texts": ("a",), "second_texts": ("a" * FAR_TOO_LONG,)}, "context_length_exceeded", "prompt"),
        ({"messages": _turn(limits.TEXT_BYTES_COUNTED + 1)}, "context_length_exceeded", "messages"),
        (
            {"conversations": (_turn(limits.TEXT_BYTES_COUNTED + 1),), "names": ("input",)},
            "context_length_exceeded",
            "input",
        ),
        (
            {"texts": ("a" * (limits.TEXT_BYTES_COUNTED + 1),), "truncate_prompt_tokens": 5},
            "request_too_large",
            "prompt",
        ),
        ({"texts": ("a",) * 1024, "suffix": "a" * 2**15}, "request_too_large", "suffix"),
    ],
)
async def test_a_text_that_is_far_too_long_is_refused_before_it_is_sent(
    fields: dict[str, Any], code: str, param: str
) -> None:
    tokenizers = Tokenizers()
    with pytest.raises(ServiceError) as refused:
        await tokenize(cast(ServiceClients, tokenizers), request(**fields), CARD, 16)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert all(len(message.prompts[0]) == 1 for message in tokenizers.asked)


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": ("a" * limits.TEXT_BYTES_ANY,)},
        {"messages": _turn(limits.TEXT_BYTES_COUNTED)},
        {"texts": ("a" * limits.TEXT_BYTES_COUNTED,), "truncate_prompt_tokens": 5},
    ],
)
async def test_a_text_that_may_be_encoded_is_sent_with_its_limit_and_its_client(fields: dict[str, Any]) -> None:
    tokenizers = Tokenizers()
    asked = replace(request(**fields), origin=Origin(client=Client("bob")))
    await tokenize(cast(ServiceClients, tokenizers), asked, CARD, 16)
    [message] = tokenizers.asked
    most = limits.TEXT_BYTES_COUNTED if asked.inputs.truncate_prompt_tokens else limits.TEXT_BYTES_ANY
    assert (message.client, message.text_bytes_max) == ("bob", most)


async def test_token_ids_are_truncated_to_their_last_ones():
    [prompt] = await prepared(request(token_ids=((1, 2, 3, 4),), truncate_prompt_tokens=2))
    assert unpack_ids(prompt.packed) == [3, 4]
    [fits] = await prepared(request(token_ids=(tuple([1] * 600),), truncate_prompt_tokens=-1))
    assert fits.num_tokens == CARD.max_model_len - 4


async def test_pairs_of_texts_stay_together_when_a_request_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "TOKENIZE_CHARS_MAX", 5)
    tokenizers = Tokenizers()
    await prepared(request(texts=("a", "b", "cd"), second_texts=("123", "4", "5")), tokenizers)
    sent = [(message.prompts, message.second_prompts) for message in tokenizers.asked]
    assert sent == [(("a",), ("123",)), (("b", "cd"), ("4", "5"))]


async def test_the_prompt_tokens_of_all_sequences_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "REQUEST_TOKENS_MAX", 8)
    assert len(await prepared(request(token_ids=((1, 2), (3, 4)), n=2))) == 2
    with pytest.raises(ServiceError, match="more than 8") as error:
        await prepared(request(token_ids=((1, 2), (3, 4)), n=3))
    assert (error.value.code, error.value.param) == ("invalid_value", "n")


async def test_the_end_tokens_of_a_filled_in_text_reach_the_engine():
    for suffix, ends in (("b", (9,)), ("", ())):
        output = OutputText(detokenize=False, spaces_between_special_tokens=False)
        asked = replace(request(texts=("a",), suffix=suffix), output=output)
        host = Host(
            transport=MemoryBus(0).connect("gateway"),
            subjects=Subjects(),
            clock=SystemClock(),
            id="g1",
            instance_id="boot0000",
        )
        messages = RequestMessages(host, asked, CARD, await prepared(asked))
        messages.sequences[0].start_placement(Address("e1", "b"), Address("d1", "b"), 0.0)
        assert messages.submit(0).params.end_token_ids == ends
        stream = messages.open_stream(0)
        assert (stream.detokenize, stream.spaces_between_special_tokens) == (False, False)


@pytest.mark.parametrize("fails", [False, True])
async def test_the_caller_is_told_when_the_preparation_is_over_also_if_it_failed(fails: bool):
    told: list[str] = []

    class Told(Caller):
        def prepared(self) -> None:
            told.append("prepared")

    actor, parts = MagicMock(), MagicMock()
    actor.request, actor.guests, actor.over = replace(request(texts=("a",)), origin=Origin(caller=Told())), (), True
    parts.host.transport.connected = not fails
    parts.bus.connected = AsyncMock(side_effect=ServiceError("no_engine", "") if fails else None)
    with pytest.raises(ServiceError) if fails else contextlib.nullcontext():
        await prepare(actor, parts)
    assert told == ["prepared"]
