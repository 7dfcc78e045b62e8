"""A running request of the offline API: its text, with the reasoning of a chat separated."""

import pytest
from tokenizers import Tokenizer

from antiphon.offline.request import LiveRequest, Submitted, Times
from antiphon.offline.sampling_params import SamplingParams
from antiphon.services.engine.core.request import Outcome
from antiphon.shared.request.outputs import CompletionOutput
from antiphon.shared.text.vocabulary import Vocabulary
from tests.tokenizer_files import byte_level, decoder_of

NOW = Times(0.0, 0.0)


def outputs(tokenizer: Tokenizer, text: str, *, prompt: str = "p", is_chat: bool = True) -> list[CompletionOutput]:
    """The output after each token of a text, which is the whole output of a request."""
    submitted = Submitted(
        request_id="r", prompt=prompt, token_ids=(1,), params=SamplingParams(max_tokens=99), seed=0, is_chat=is_chat,
        arrived=NOW, started=NOW, preprocess_s=0.0,
        arrival_time=0.0,
    )  # fmt: skip
    request = LiveRequest(submitted, Vocabulary(tokenizer, decoder_of(tokenizer)), 500)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    shown: list[CompletionOutput] = []
    for position, token_id in enumerate(ids):
        reason = "stop" if position == len(ids) - 1 else None
        request.take(
            0, Outcome(sequence_id="r-0", position=position, token_ids=(token_id,), finish_reason=reason), NOW, 0.0
        )
        shown += request.output().outputs
    return shown


@pytest.mark.spec("S-OFF-052")
@pytest.mark.parametrize("special", [False, True])
def test_the_text_between_the_think_tags_is_reasoning_and_no_text(special: bool) -> None:
    tokenizer = byte_level()
    if special:
        tokenizer.add_special_tokens(["<think>", "</think>"])
    *growing, whole = outputs(tokenizer, "<think>\nHm. Two\n</think>\n\nThree")
    assert (whole.reasoning_content, whole.text) == ("Hm. Two", "Three")
    for one in growing:
        assert "Hm. Two".startswith(one.reasoning_content or "")
        assert "Three".startswith(one.text or "")
    assert any(one.reasoning_content == "Hm." for one in growing)
    begun = outputs(tokenizer, "Hm.</think>Three", prompt="p<think>\n")[-1]
    assert (begun.reasoning_content, begun.text) == ("Hm.", "Three")


@pytest.mark.spec("S-OFF-052")
def test_an_output_without_think_tags_has_no_reasoning() -> None:
    tokenizer = byte_level()
    assert (outputs(tokenizer, "Three")[-1].reasoning_content, outputs(tokenizer, "Three")[-1].text) == (None, "Three")
    text = "<think>Hm.</think>Three"
    plain = outputs(tokenizer, text, is_chat=False)[-1]
    assert (plain.reasoning_content, plain.text) == (None, text)
