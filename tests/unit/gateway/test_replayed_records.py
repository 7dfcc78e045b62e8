"""`POST /v1/replay` with records that a client wrote: they are checked like requests."""

from typing import Any

import msgspec
import pytest

from antiphon.services.gateway.guests.replay.checks import check_record
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import BeamParams, SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget
from antiphon.shared.recorded_request import RecordedContent, RecordedPrompt, RecordedSequence, decode, encode
from tests.integration.edge import CARD, ScriptedBackend, call, serving

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


def record(count: int = 1, params: SamplingParams = GREEDY, **changes: Any) -> RecordedContent:
    given: dict[str, Any] = {
        "request_id": "x", "created": 0.0, "model": CARD.name, "path": CARD.path, "max_model_len": 512,
        "configuration": [], "n": count, "num_sequences": count, "params": params, "prompts": [RecordedPrompt([5, 6])],
        "sequences": [RecordedSequence([1, 2])] * count,
    }  # fmt: skip
    return RecordedContent(**{**given, **changes})


def with_params(**changes: Any) -> RecordedContent:
    return record(params=msgspec.structs.replace(GREEDY, **changes))


def with_thinking(budget: int, opening: tuple[int, ...], closing: tuple[int, ...]) -> RecordedContent:
    return with_params(thinking=ThinkingBudget(budget=budget, opening=opening, closing=closing))


BEAM = BeamParams(4, 0)
GOOD = [
    record(),
    record(3),
    with_params(max_tokens=0),
    with_params(max_tokens=0, min_tokens=7),
    record(begun=[1, 2], params=msgspec.structs.replace(GREEDY, max_tokens=3)),
    record(2, params=msgspec.structs.replace(GREEDY, beam=BEAM)),
    record(stop=["x"] * limits.STOP_STRINGS_MAX),
    with_params(grammar=Grammar("regex", "(a|b)*")),
    record(sequences=[RecordedSequence([])]),
]
BAD = {
    "choices": record(limits.CHOICES_MAX + 1),
    "sequences in all": record(
        128, prompts=[RecordedPrompt([5])] * 9, sequences=[RecordedSequence([])] * 9 * 128
    ),
    "prompts": record(
        prompts=[RecordedPrompt([5])] * (limits.SEQUENCES_PER_REQUEST_MAX + 1),
        sequences=[RecordedSequence([])] * (limits.SEQUENCES_PER_REQUEST_MAX + 1),
    ),
    "stop strings": record(stop=["x"] * (limits.STOP_STRINGS_MAX + 1)),
    "a long stop string": record(stop=["x" * (limits.STOP_STRING_CHARS_MAX + 1)]),
    "an empty stop string": record(stop=[""]),
    "special tokens": record(shown_special_tokens=["x"] * 100),
    "an empty prompt": record(prompts=[RecordedPrompt([])]),
    "a prompt outside the vocabulary": record(prompts=[RecordedPrompt([CARD.vocab_size])]),
    "a prompt below it": record(prompts=[RecordedPrompt([-1])]),
    "end tokens": record(prompts=[RecordedPrompt([5], list(range(limits.STOP_TOKEN_IDS_MAX + 1)))]),
    "end tokens below 0": record(prompts=[RecordedPrompt([5], [-1])]),
    "end tokens of the parameters": with_params(end_token_ids=(2**40,)),
    "begun below the vocabulary": record(begun=[-5]),
    "begun outside of it": record(begun=[2**40]),
    "a recorded token outside of it": record(sequences=[RecordedSequence([10**9])]),
    "a context below 1": record(max_model_len=-(2**60)),
    "an endless context": record(max_model_len=2**60),
    "temperature": with_params(temperature=-1.0),
    "top_k": with_params(top_k=-99),
    "max_tokens": with_params(max_tokens=-5),
    "bias": with_params(logit_bias=((5, 1.0),) * (limits.LOGIT_BIAS_MAX + 1)),
    "bias outside of the vocabulary": with_params(logit_bias=((10**7, 1.0),)),
    "bad words": with_params(bad_words=((5,) * 10_000,)),
    "reasoning without an end": with_thinking(1, (5,), ()),
    "marks of reasoning that are long": with_thinking(1, (5,) * 100, (6,)),
    "marks of reasoning outside of the vocabulary": with_thinking(1, (5,), (10**7,)),
    "a budget below nothing": with_thinking(-1, (5,), (6,)),
    "beams": with_params(beam=BeamParams(1000, 0)),
    "beams and temperature": with_params(beam=BEAM, temperature=1.0),
    "a long grammar": with_params(grammar=Grammar("regex", "a" * (limits.GRAMMAR_BYTES_MAX + 1))),
    "a long pattern of whitespace": with_params(grammar=Grammar("json", "{}", "a" * limits.GRAMMAR_BYTES_MAX)),
    "tags that cannot be read": with_params(grammar=Grammar("tagged_text", "[1]")),
}  # fmt: skip


@pytest.mark.parametrize("content", GOOD)
def test_what_a_request_can_have_recorded_passes(content: RecordedContent) -> None:
    check_record(decode(encode(content)), CARD)


@pytest.mark.parametrize("name", BAD)
async def test_a_record_that_no_request_can_have_made_is_refused(name: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_record(BAD[name], CARD)
    assert caught.value.code == "invalid_value"
    backend = ScriptedBackend()
    async with serving(backend) as port:
        answer = await call(port, "POST", "/v1/replay", {"record": msgspec.to_builtins(BAD[name])})
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert backend.requests == []


async def test_a_number_that_does_not_fit_into_64_bits_is_refused() -> None:
    content = msgspec.to_builtins(record())
    content["sequences"][0]["token_ids"] = [2**70]
    async with serving(ScriptedBackend()) as port:
        assert (await call(port, "POST", "/v1/replay", {"record": content})).status == 400
