"""The context of one generation over HTTP: the properties of the request that determine the form of its answer."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard

Kind = Literal["completion", "chat"]
ID_PREFIX: dict[Kind, str] = {"completion": "cmpl-", "chat": "chatcmpl-"}


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a run that resumes a stream takes from the first run of the request. `created`: Unix seconds.

    `fetched`: files of images that the first run has fetched, by URL.
    """

    created: int
    seed: int | None
    fetched: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival time of a request: `created` in Unix seconds, `started_s` in monotonic seconds for measurements."""

    created: int
    started_s: float

    @classmethod
    def now(cls) -> "Arrival":
        """Returns the current time. Must be called before any other work for the request."""
        return cls(int(time.time()), time.perf_counter())

    @classmethod
    def of(cls, request: Request) -> "Arrival":
        """Returns the current time. If the request resumes a stream, `created` is that of the stream."""
        resumption: Resumption | None = request.scope["state"].get("resumption")
        return cls(int(time.time()) if resumption is None else resumption.created, time.perf_counter())


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context of one generation. By default it answers one conversation and tells the numbers of tokens.

    `echoes`: for each prompt, the text before its answers; empty strings unless the request asks for an echo.
    """

    kind: Kind = "chat"
    arrival: Arrival
    card: ModelCard
    request: GenerationRequest
    stream: bool
    include_usage: bool = True
    echoes: tuple[str, ...] = ("",)
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether tokens in log probabilities are written as their ids."""
    continuous_usage: bool = False
    """Whether every chunk of a stream has the token counts so far."""
    timings: bool = False
    """Whether the answer has the times of the request's phases."""
    id_prefix: str = ""
    """Prefix of the response's id; if empty, the prefix of the kind."""
    answer_format: AnswerFormat | None = None
    """How the answer is separated from the output; None if the whole output is the answer's text."""
    prompt_logprobs: int | None = None
    """Number of candidates in the answer's field `prompt_logprobs`; None: the answer does not have the field."""
    echoes_logprobs: bool = False
    """Whether the log probabilities of the echoed prompt come before those of the output."""

    @property
    def id(self) -> str:
        """The id of the response: a prefix and the request id."""
        return (self.id_prefix or ID_PREFIX[self.kind]) + self.request.request_id

    @property
    def tier(self) -> dict[str, str]:
        """The member `service_tier` of an answer; none if the request named no tier."""
        return {"service_tier": self.request.service_tier} if self.request.service_tier else {}

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all prompts together."""
        return len(self.echoes) * self.request.num_sequences

    def echo(self, index: int) -> str:
        """Returns the text before the answer of one choice."""
        return self.echoes[self.prompt_of(index)]

    def prompt_of(self, index: int) -> int:
        """Returns the index of the prompt of one choice."""
        return index // self.request.n


def system_fingerprint(card: ModelCard) -> str:
    """Returns a hash of everything that can change the tokens of a seeded request: the model, its limits, its engines.

    If engines of different configurations serve the model, for example during an update, the hash covers all of them.
    """
    message = f"{card.name}\0{card.path}\0{card.max_model_len}\0{card.vocab_size}\0{' '.join(card.configuration)}"
    message += f"\0{card.adapter_version}" if card.adapter_version else ""
    return "fp_" + hashlib.sha256(message.encode()).hexdigest()[:12]
