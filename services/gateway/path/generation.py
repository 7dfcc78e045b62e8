"""The interface between the HTTP edge and the request actors: requests, updates, and the backend's methods.

The HTTP edge (`app`, `http`, `openai`) does not use the bus; the actors (`actor`, `requests`) do not use HTTP. Both
depend on this file.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from antiphon.services.gateway.path.record import NOT_RECORDED, RecordedRequest
from antiphon.services.gateway.path.sequence_state import SequenceState, SequenceUpdate
from antiphon.shared.codec import TOKEN_BYTES
from antiphon.shared.messages import ChatMessage, ModelFacts
from antiphon.shared.parameters.pooling import PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request.images import ImageInput

FLEX = "flex"
"""OpenAI's service tier for requests that may wait: they run in the idle lane."""
_NO_FACTS = ModelFacts()


class Client(msgspec.Struct, frozen=True):
    """The client of a request: the name of an API key (empty without keys), and its share of the engines.

    `weight`: share in comparison with other clients. `priority`: clients with a lower number go first.
    """

    name: str = ""
    weight: float = 1.0
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingLimit:
    """A limit on the tokens of the reasoning in an answer. Tokenizers convert the marks around it to token ids.

    `begins_inside`: whether the output begins within the reasoning, from the end of the prompt's text. `repeats`:
    whether an output may have reasoning anywhere and several times, not only at its beginning.
    """

    budget: int
    opening: str
    closing: str
    begins_inside: Callable[[str], bool]
    repeats: bool = False


class Caller:
    """The HTTP request that a generation is for, as far as the path has to know it. This base class stands for none."""

    __slots__ = ()

    @property
    def refuses_long_outputs(self) -> bool:
        """Whether a maximum of tokens beyond what fits is refused, in place of being cut and told."""
        return False

    def prepared(self) -> None:
        """The prompts are tokenized, or the request has ended before."""

    def ignore(self, name: str) -> None:
        """Tells the client that a field of its request has no effect."""


NO_CALLER = Caller()


class Reservation(Protocol):
    """A request's part of the limits of its API key. The first method call ends it; later calls have no effect."""

    def withdraw(self) -> None:
        """Ends the reservation of a request that was not run, as if it had not been made."""
        ...

    def finish(self, tokens: int) -> None:
        """Ends the reservation of a request that has used this number of tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedOutput:
    """Output that a former run of a request has accepted, for each sequence. It is continued, not computed again.

    The updates of the new run contain the text of the whole output, but not these tokens again. `fence`: fencing token
    of the run, above that of every former run; it makes the attempts of the sequences higher than all earlier ones.
    `num_cached_tokens`: prompt tokens that the first run found in the prefix cache, None if it had no output.
    `engines`: id and instance id of the engine on which each sequence ran last; it has the sequence's KV, and may still
    compute it.
    """

    token_ids: tuple[tuple[int, ...], ...]
    cumulative_logprobs: tuple[float, ...]
    num_cached_tokens: tuple[int | None, ...]
    fence: int
    engines: tuple[tuple[str, str] | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(map(len, self.token_ids))


class PromptInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompts are made of. Exactly one of `texts`, `token_ids`, `messages` and `conversations` is set."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    """A conversation."""
    conversations: tuple[tuple[ChatMessage, ...], ...] = ()
    """Several conversations, each of which is a prompt."""
    suffix: str = ""
    """Text after the output of each of `texts`."""
    second_texts: tuple[str, ...] = ()
    """For each of `texts`, the second text of a pair; the two texts become one prompt. Empty: there are no pairs."""
    images: tuple[ImageInput, ...] = ()
    """The images of `messages`, in order."""
    names: tuple[str, ...] = ()
    """For each prompt, its name in the user's request, for errors; empty: all are `prompt`."""
    truncate_prompt_tokens: int = 0
    """Number of last tokens that are kept of each prompt; 0: all, -1: as many as fit before `max_tokens`."""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: bytes = b""
    """A JSON object: further variables of the chat template; b"" for none."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts; a conversation is one prompt."""
        return len(self.texts) + len(self.token_ids) + bool(self.messages) + len(self.conversations)

    @property
    def num_characters(self) -> int:
        """Number of characters that tokenizers convert: texts, and the inputs of the chat template."""
        count = sum(map(len, (*self.texts, *self.second_texts))) + len(self.suffix) * len(self.texts)
        for conversation in [self.messages] if self.messages else self.conversations:
            count += len(self.template_variables)
            for message in conversation:
                count += len(message.content) + len(message.fields)
        return count

    @property
    def num_given_tokens(self) -> int:
        """Number of tokens of the prompts that are given as token ids, also as contents of messages."""
        messages = [*self.messages, *(message for conversation in self.conversations for message in conversation)]
        packed = sum(len(message.token_ids) for message in messages)
        return sum(map(len, self.token_ids)) + packed // TOKEN_BYTES

    def name(self, index: int) -> str:
        """Returns the name of a prompt in the user's request."""
        return self.names[index] if self.names else "prompt"


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """How detokenizers make text of the output tokens, and where the text ends."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    """Whether the output has text; if not, it has only token ids."""
    shown_special_tokens: tuple[str, ...] = ()
    """Texts of special tokens that the output has although `skip_special_tokens` is set."""
    only_echoes: bool = False
    """Whether the answer has only the echo of the prompt and no output. `params.max_tokens` is then 1."""


class PendingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes a part of the sampling parameters when tokenizers have converted or checked it."""

    bad_word_texts: tuple[str, ...] = ()
    """Words of `bad_words` as texts; tokenizers convert them to `params.bad_words`."""
    grammar_param: str = ""
    """Name of the request's field that `params.grammar` comes from, for errors."""
    grammar_ignored: tuple[str, ...] = ()
    """Keywords of the schema in this field that `params.grammar` does without."""
    thinking: ThinkingLimit | None = None
    """Becomes `params.thinking` when the prompt has been tokenized."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who has sent a request, and who follows it."""

    client: Client = Client()
    caller: Caller = NO_CALLER
    reservation: Reservation | None = None
    """The part of its key's limits that the request already has, if it was admitted before `Backend.generate`."""
    trace_headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    record: RecordedRequest = NOT_RECORDED
    """Takes the events of the request, for its timeline."""


class GuestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What features that a request may use ask of the path. The defaults stand for a request that uses none."""

    lockstep: bool | None = None
    """Whether two engines must agree on each token that is shown; None: the server decides."""
    idle_s: float = 0.0
    """Time for which the request runs in the idle lane (with lower priority than all others), seconds; 0: not at all.
    """
    engine: str = ""
    """Id of the only engine that may run the request; empty: any engine of the model."""
    begun: tuple[int, ...] = ()
    """Tokens with which the output of every sequence begins: the engines continue after them, as after the loss of an
    engine."""
    resumed: ResumedOutput | None = None
    """The output of a former run of this request that it continues, if any."""
    orders: tuple[object, ...] = ()
    """What features that the path does not know are to do in this request, each an object of a type of its own."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted HTTP request, independent of the API.

    `params.max_tokens` 0 means as many tokens as fit (the default of chat); the number is filled in when the length of
    the prompt is known. Each prompt has `num_sequences` sequences, of which the best `n` are returned as choices:
    sequence index = prompt index * num_sequences + choice. Choice c > 0 samples with a seed derived from the request's
    seed, so that the choices differ. With `pooling` the request generates nothing: each prompt has one sequence, which
    ends with one update that has its vector.
    """

    request_id: str
    model: str
    params: SamplingParams
    inputs: PromptInputs = PromptInputs()
    n: int = 1
    best_of: int = 0
    """Number of sequences for each prompt if more than `n`."""
    pooling: PoolingParams | None = None
    output: OutputText = OutputText()
    pending: PendingParams = PendingParams()
    cache_salt: bytes = b""
    priority: int = 0
    """Order among the requests of the same client: lower first."""
    timeout_s: float = 0.0
    """Time after which the request fails with `deadline_exceeded`, seconds; 0: never."""
    service_tier: str = ""
    """The tier that the answer names, FLEX or `default`; empty: the request asked for none."""
    kv_keep_s: float = 0.0
    """How long the KV of the prompts is to be kept on the engine's disk, seconds; 0: as long as there is room."""
    origin: Origin = msgspec.field(default_factory=Origin)
    guests: GuestOptions = GuestOptions()

    @property
    def num_sequences(self) -> int:
        """Number of sequences for each prompt."""
        return max(self.n, self.best_of)


class TokenCounts(msgspec.Struct, frozen=True):
    """Token counts of a request so far.

    `prompt`: of all prompts. `cached`: prompt tokens taken from the prefix cache. `computed`: tokens that engines have
    computed, including those computed again after the loss of an engine. `generated`: output tokens that have reached
    the gateway.
    """

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times at which the first phases of a request ended, in seconds since `Backend.generate`. None: not yet."""

    tokenized_s: float | None = None
    """The prompts had been tokenized."""
    placed_s: float | None = None
    """The first sequence had been sent to an engine, where it may wait in the queue."""


class Generation(Protocol):
    """A request in progress. It ends exactly once: the updates end, or raise ServiceError."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in all prompts of the request. Valid after `updates` has given its first item; 0 before."""
        ...

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """Token ids of each prompt. Valid when `num_prompt_tokens` is."""
        ...

    @property
    def times(self) -> RequestTimes:
        """When the request was tokenized and placed."""
        ...

    @property
    def token_counts(self) -> TokenCounts:
        """The tokens of the request so far; after its end, of the whole request."""
        ...

    @property
    def prompt_tail(self) -> str:
        """The last characters of the rendered conversation. Valid when `num_prompt_tokens` is; "" without messages."""
        ...

    @property
    def outputs(self) -> Sequence[SequenceState]:
        """The sequences with their accepted output so far, only to be read.

        Empty before `num_prompt_tokens` is valid, then one object.
        """
        ...

    def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Yields batches of updates; those of one sequence are in order. Raises ServiceError if the request fails."""
        ...

    async def cancel(self, reason: str, cause: str = "") -> None:
        """Ends all sequences that are still running. Idempotent; does nothing after the end.

        `cause`: who ended the request early, for its record: a code of `record.explanation.ENDINGS` or of an error;
        empty: unknown.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that running engines serve, or an adapter of one.

    `path`: directory or hub name from which engines loaded it.

    `configuration`: the distinct values of `EngineStatus.configuration` of the model's engines, sorted.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for the model."""
    configuration: tuple[str, ...] = ()
    tool_format: str = ""
    """How the model writes calls of tools, by its chat template; a key of `parsers.formats.TOOL_FORMATS` or ""."""
    reasoning_format: str = ""
    """How the model marks its reasoning, by its chat template; a key of REASONING_FORMATS or ""."""
    embedding_size: int = 0
    """See `EngineStatus.embedding_size`."""
    takes_images: bool = False
    """Whether conversations may contain images."""
    generates: bool = True
    """Whether the model can generate text."""
    labels: tuple[str, ...] = ()
    """See `EngineStatus.labels`."""
    base: str = ""
    """Of an adapter: the served name of the model that it belongs to; empty for a model."""
    adapter_version: str = ""
    """Of an adapter: the hash of its files."""
    facts: ModelFacts = _NO_FACTS
    """What its files say about it, as one of its engines has read them."""
    content: str = ""
    """See `EngineStatus.content`."""
    kept_block_size: int = 0
    """Tokens of a block of KV, if its engines keep blocks on a disk; 0: they do not."""
    version_name: str = ""
    """For a model with several versions: the bus name of the active version; else empty."""

    @property
    def served_by(self) -> str:
        """The bus name of the services for this card: that of the active version, the adapter's base, or the model."""
        return self.version_name or self.base or self.name


class Backend(Protocol):
    """The methods of the gateway's actor that the HTTP edge calls."""

    def models(self) -> list[ModelCard]:
        """Returns the models that can be used now, the default model first."""
        ...

    def resolve_model(self, name: str | None) -> ModelCard:
        """Returns the model of a request.

        None, '' and 'default' mean the default model or, if none is set, the first usable model by name. Raises
        ServiceError: 'model_not_found', or 'no_engine', 'no_tokenizer' or 'no_detokenizer' if that service is missing.
        """
        ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Accepts a request and starts it. Raises ServiceError if the request is refused (overload, draining, …)."""
        ...

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """Returns for each text, or for the conversation, its token ids and (if `return_tokens`) each token's text."""
        ...

    async def fetch_images(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with the files of images that are given by URL. Raises ServiceError naming an image.

        Nothing is fetched for a request that the limits of its key do not admit. The returned request may have a
        `reservation`: the caller passes the request to `generate`, or withdraws the reservation.
        """
        ...

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """Returns the text of token ids."""
        ...

    async def token_texts(self, model: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """Returns the text of each token inside a longer text; U+FFFD for a part of a character."""
        ...

    def ready(self) -> str:
        """Returns '' if requests can be served; else a sentence that names the missing services."""
        ...
