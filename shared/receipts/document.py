"""What a receipt says, its bytes, and the digests of token ids in it. Pure.

New fields are appended with a default. `version` changes only if an older reader would misread the receipt.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from antiphon.shared.codec import TOKEN_BYTES, pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import FinishReason
from antiphon.shared.parameters.sampling import SamplingParams

VERSION = 1
LINK_TOKENS = 64
"""Smallest number of tokens between two links."""
LINKS_MAX = 64
"""Largest number of links of an output, so that the size of a receipt is limited."""
MEMBER, EVIDENCE = "antiphon_receipt", "antiphon_evidence"
"""The members of an answer that have the receipt, and the token ids beside it."""


class ModelClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model's files: their digests, each "" if the server did not know it."""

    name: str
    """The name by which the server serves it."""
    weights: str = ""
    """Of config.json and of the weight files (`weights_digest` of the engine)."""
    tokenizer: str = ""
    template: str = ""
    """Of the chat template's text."""


class EngineClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that computed tokens. Engines with equal claims compute equal tokens, and are told once."""

    version: str = ""
    """Of the software."""
    numerics: str = ""
    """What decides the last bits: backend, instruction set, quantization, data types of weights and KV cache."""
    configuration: str = ""
    """Hash of `numerics`, of config.json and of all software that takes part (`EngineStatus.configuration`)."""
    content: str = ""
    """Hash of the weights as they are computed with (`EngineStatus.content`)."""
    batch_invariant: bool = False
    """Whether its tokens cannot depend on other requests."""


class PromptClaim(msgspec.Struct, frozen=True):
    """A prompt: the digest and the number of its token ids."""

    digest: str
    num_tokens: int


class OutputClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output. `prompt`: index of its prompt. `params`: see `told_params`."""

    prompt: int = 0
    params: dict[str, Any]
    num_tokens: int
    digest: str
    """Of all tokens."""
    link_every: int
    """Number of tokens between two links."""
    links: list[str] = []
    """Digests of the first `link_every` tokens, of twice as many, and so on, as far as they are complete."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    begun: int = 0
    """Number of leading tokens that the request gave: they were not chosen by the model."""
    engines: list[int]
    """Indices of the engines that computed it, in order."""
    resumed: int = 0
    """Number of leading tokens that an earlier gateway has recorded, whose engines this receipt may not name."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server says about one answer. Digests are SHA-256 in hexadecimal digits unless said otherwise."""

    version: int
    request_id: str
    created: int
    """Unix time in seconds at which the receipt was made."""
    model: ModelClaim
    engines: list[EngineClaim]
    prompts: list[PromptClaim]
    outputs: list[OutputClaim]
    stop: list[str] = []
    """Stop strings, at which the text of an output ends."""


class Evidence(msgspec.Struct, frozen=True):
    """The token ids beside a receipt, by which anybody can check it without the request."""

    prompts: list[list[int]]
    outputs: list[list[int]]


_encode = msgspec.json.Encoder(order="sorted").encode
_DECODER = msgspec.json.Decoder(Receipt)
_EVIDENCE = msgspec.json.Decoder(Evidence)
_NO_EFFECT = ("logprobs", "prompt_logprobs")
"""Parameters that change what is reported and not what is chosen."""
_DEFAULTS: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(SamplingParams()))


def encode(receipt: Receipt) -> bytes:
    """Returns the canonical bytes: JSON with sorted keys and without spaces; members with their defaults left out."""
    return _encode(receipt)


def decode(data: bytes) -> Receipt:
    """Returns the receipt of its bytes. Raises ServiceError('invalid_value') if it is none of this version."""
    try:
        receipt = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServiceError("invalid_value", f"The receipt cannot be read: {error}.") from error
    if receipt.version != VERSION:
        message = f"The receipt has version {receipt.version}; this build reads version {VERSION}."
        raise ServiceError("invalid_value", message)
    if not receipt.prompts or not receipt.outputs:
        raise ServiceError("invalid_value", "The receipt has no outputs.")
    for output in receipt.outputs:
        has_engines = all(0 <= one < len(receipt.engines) for one in output.engines) and output.engines
        if not (0 <= output.prompt < len(receipt.prompts) and has_engines and _is_consistent(output)):
            raise ServiceError("invalid_value", "The receipt contradicts itself.")
    return receipt


def _is_consistent(output: OutputClaim) -> bool:
    return output.link_every > 0 and len(output.links) == output.num_tokens // output.link_every


def decode_evidence(data: bytes) -> Evidence:
    """Returns the evidence of its JSON. Raises ServiceError('invalid_value')."""
    try:
        return _EVIDENCE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServiceError("invalid_value", f"The evidence beside the receipt cannot be read: {error}.") from error


def digest(token_ids: Sequence[int] | bytes) -> str:
    """Returns the digest of token ids, each as four bytes, the lowest first. Bytes are ids in this form."""
    return hashlib.sha256(token_ids if isinstance(token_ids, bytes) else pack_ids(token_ids)).hexdigest()


def link_every(num_tokens: int) -> int:
    """Returns the number of tokens between two links of an output of this length."""
    every = LINK_TOKENS
    while num_tokens // every > LINKS_MAX:
        every *= 2
    return every


def links(token_ids: Sequence[int], every: int) -> list[str]:
    """Returns the links of an output: the digests of its first `every` tokens, of twice as many, and so on."""
    return list(_links(pack_ids(token_ids), every * TOKEN_BYTES))


def _links(packed: bytes, step: int) -> Iterator[str]:
    running = hashlib.sha256()
    for end in range(step, len(packed) + 1, step):
        running.update(packed[end - step : end])
        yield running.copy().hexdigest()


def first_wrong_link(output: OutputClaim, token_ids: Sequence[int]) -> int | None:
    """Returns the index of the first link that is not that of the tokens; None if all links are right."""
    found = links(token_ids, output.link_every)
    pairs = zip(output.links, found, strict=False)
    return next((index for index, (told, own) in enumerate(pairs) if told != own), None)


def told_params(params: SamplingParams) -> dict[str, Any]:
    """Returns what a receipt says of parameters: those that choose tokens and have not their defaults, and the seed."""
    given = msgspec.to_builtins(msgspec.structs.asdict(params))
    told = {name: one for name, one in given.items() if one != _DEFAULTS[name] and name not in _NO_EFFECT}
    return told | {"seed": params.seed}


def params_of(told: dict[str, Any]) -> SamplingParams:
    """Returns the parameters that `told_params` has told. Raises ServiceError('invalid_value') for unknown ones."""
    unknown = told.keys() - _DEFAULTS.keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ServiceError("invalid_value", f"The receipt has parameters that this build does not know: {names}.")
    try:
        # The struct is an array in messages, so the values are put in their order.
        return msgspec.convert([told.get(name, default) for name, default in _DEFAULTS.items()], SamplingParams)
    except msgspec.ValidationError as error:
        raise ServiceError("invalid_value", f"The parameters in the receipt cannot be read: {error}.") from error
