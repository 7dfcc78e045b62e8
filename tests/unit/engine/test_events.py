"""Bus messages of an outcome: log probabilities of a prompt in parts that fit, then the tokens."""

import numpy as np

from antiphon.services.engine.core.request import Outcome
from antiphon.services.engine.steps.events import token_events
from antiphon.shared import limits
from antiphon.shared.codec import pack_ids, unpack_floats, unpack_ids
from antiphon.shared.messages import PromptLogprobs


def test_the_log_probabilities_of_a_prompt_are_cut_into_parts_that_say_the_same() -> None:
    count = 2 * limits.PROMPT_LOGPROBS_TOKENS_MAX + 3
    values = np.arange(count, dtype="<f4")
    tops = np.arange(2 * count, dtype="<f4")
    whole = PromptLogprobs(
        start=1,
        token_ids=pack_ids(range(count)),
        logprobs=values.tobytes(),
        num_top=2,
        top_token_ids=pack_ids(range(2 * count)),
        top_logprobs=tops.tobytes(),
    )
    first = PromptLogprobs(start=0, token_ids=pack_ids([7]), logprobs=values[:1].tobytes())
    *prompt, tokens = token_events(
        Outcome(sequence_id="s", position=0, token_ids=(5,), prompt_logprobs=(first, whole)), "r-0", 1
    )
    assert (tokens.token_ids, tokens.prompt_logprobs) == ((5,), None)
    parts = [event.prompt_logprobs for event in prompt if event.prompt_logprobs is not None]
    assert [event.token_ids for event in prompt] == [()] * 4
    assert [part.start for part in parts] == [0, 1, 129, 257]
    assert [len(part.token_ids) // 4 for part in parts] == [1, 128, 128, 3]
    assert unpack_ids(b"".join(part.token_ids for part in parts[1:])) == list(range(count))
    assert unpack_floats(b"".join(part.logprobs for part in parts[1:])) == values.tolist()
    assert unpack_ids(b"".join(part.top_token_ids for part in parts)) == list(range(2 * count))
    assert unpack_floats(b"".join(part.top_logprobs for part in parts)) == tops.tolist()


def test_an_outcome_without_a_prompt_is_one_event() -> None:
    assert len(token_events(Outcome(sequence_id="s", position=3, token_ids=(5,)), "r-0", 1)) == 1
