"""How prompts become token ids before a request is placed."""

from typing import Any, cast

import pytest

from services.gateway.generation import GenerationRequest
from services.gateway.requests.messages import Prompt, RequestMessages
from services.gateway.requests.preparation import tokenize
from services.gateway.requests.sequence_state import Address
from services.gateway.requests.service_clients import ServiceClients
from shared import limits
from shared.actors.host import Host
from shared.clock import SystemClock
from shared.codec import pack_ids, unpack_ids
from shared.errors import ServiceError
from shared.messages import ChatMessage, TokenizedPrompt, TokenizeReply, TokenizeRequest
from shared.parameters.sampling import SamplingParams
from shared.subjects import Subjects
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
        found = tuple(TokenizedPrompt(pack_ids([ord(letter) for letter in text])) for text in texts)
        return TokenizeReply(message.request_id, found, end_token_ids=(9,) if message.suffix else ())


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest("r" * 22, CARD.name, SamplingParams(max_tokens=4), **fields)


async def prepared(asked: GenerationRequest, tokenizers: Tokenizers | None = None) -> list[Prompt]:
    return (await tokenize(cast(ServiceClients, tokenizers or Tokenizers()), asked, CARD, 0)).prompts


async def test_each_conversation_is_rendered_by_itself_and_in_order():
    tokenizers = Tokenizers()
    conversations = tuple((ChatMessage("user", text),) for text in ("a", "bc"))
    prompts = await prepared(request(conversations=conversations), tokenizers)
    assert [unpack_ids(prompt.packed) for prompt in prompts] == [[97], [98, 99]]
    assert [message.messages for message in tokenizers.asked] == list(conversations)


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
        asked = request(texts=("a",), suffix=suffix, detokenize=False, spaces_between_special_tokens=False)
        host = Host(MemoryBus(0).connect("gateway"), Subjects(), SystemClock(), "g1", "boot0000")
        messages = RequestMessages(host, asked, CARD, await prepared(asked))
        messages.sequences[0].start_placement(Address("e1", "b"), Address("d1", "b"), 0.0)
        assert messages.submit(0).params.end_token_ids == ends
        stream = messages.open_stream(0)
        assert (stream.detokenize, stream.spaces_between_special_tokens) == (False, False)
