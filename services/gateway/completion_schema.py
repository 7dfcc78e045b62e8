"""The body of `POST /v1/completions`."""

import msgspec

from services.gateway.openai_api import SamplingFields


class CompletionBody(SamplingFields, kw_only=True):
    """Text or token ids to continue."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: int | None = None
    """Candidates to report with each token, 0 to 5."""


DECODER = msgspec.json.Decoder(CompletionBody)
