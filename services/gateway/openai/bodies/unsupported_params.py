"""Checks the names of the fields in a request body, so that no field is ignored without an error.

A body may have the fields of its schema, the fields of `NO_EFFECT`, and the fields of `UNSUPPORTED`. The latter exist
in other servers but not here; they are accepted only with a value that has no effect (their default). Any other name is
refused, and the error suggests the nearest known name. null counts as the default for every name.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from services.gateway.openai.body import RawFields, StreamOptions, read_any
from services.gateway.openai.schemas import ChatBody, CompletionBody
from shared import limits
from shared.errors import ServiceError
from shared.request.conversation import Turn

NO_EFFECT = frozenset(
    {
        # the client's own bookkeeping, which does not change the answer
        "metadata",
        "safety_identifier",
        "store",
        "user",
        # performance hints: prefixes are cached without a key, draft tokens come from the request's own text
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields that are accepted and ignored, because the answer is the same without them."""


class Unsupported(NamedTuple):
    """How to handle a field that other servers have and this one does not support."""

    asks_nothing: tuple[Any, ...]
    """Values without effect (the default), which are accepted."""
    instead: str = ""
    """A sentence for the error message that says what to do instead."""


_OFF = Unsupported((None, False))
_ON = Unsupported((None, True))
_EMPTY = Unsupported((None, [], {}, ""))
_NULL = Unsupported((None,))
_NATIVE = Unsupported((None,), "Send it to /generate.")
UNSUPPORTED: dict[str, Unsupported] = {
    "suffix": Unsupported((None, ""), "Send it to /v1/completions."),
    "logits_processors": _EMPTY,
    "verbosity": Unsupported((None, "medium")),
    "audio": _NULL,
    "modalities": Unsupported((None, [], ["text"])),
    "web_search_options": _NULL,
    "chat_template": _NULL,
    "multi_modal_inputs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "prompt_embeds": _NULL,
    "kv_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
    "system": Unsupported((None,), "Send a message with the role 'system' to /v1/chat/completions."),
    "history": Unsupported((None,), "Send the conversation in 'messages' to /v1/chat/completions."),
    "prompt_token_ids": Unsupported((None,), "Send the token ids in 'prompt' to /v1/completions."),
    "sampling_params": Unsupported((None,), "Send its members as fields of the request."),
    "request_id": Unsupported(
        (None,), "Send it to /generate, or as the header X-Request-Id; 'id' is the server's own."
    ),
    "prompt_token_ids_len": _NATIVE,
    "arrival_time": _NATIVE,
    "preprocess_start_time": _NATIVE,
    "preprocess_end_time": _NATIVE,
}
_PREFIXES: Mapping[str, Unsupported] = {
    "guided_": _OFF,
    "beam_": Unsupported((None, False), "Give 'use_beam_search' and 'best_of'."),
}
"""All names with one of these prefixes are unsupported."""
_ONLY_CHAT = [name for name in ChatBody.__struct_fields__ if name not in CompletionBody.__struct_fields__]
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(_ONLY_CHAT, "Conversations go to /v1/chat/completions."),
    "input": "Texts to embed go to /v1/embeddings.",
    "prompt": "Prompts go to /v1/completions.",
    "tokens": "Token ids go to /detokenize.",
}
"""A sentence for the error message about a field that is known only at another endpoint."""
_STREAM_OPTIONS_NO_EFFECT = frozenset({"include_obfuscation"})
MESSAGE_FIELDS: Mapping[str, Unsupported] = {
    "refusal": Unsupported((None, "")),
    "audio": _NULL,
    "annotations": _EMPTY,
    "prefix": Unsupported((None, False), "Set 'continue_final_message' of the request."),
    "partial": Unsupported((None, False), "Set 'continue_final_message' of the request."),
    "weight": Unsupported((None, 1)),
}
"""Fields of messages that are not supported. Clients that send an answer back as a message send some of them."""
_MESSAGES = msgspec.json.Decoder(list[RawFields | list[RawFields]])
_NOTHING: msgspec.Raw = msgspec.Raw(b"null")


class FieldRules(NamedTuple):
    """The field names of one API, besides those in the schemas of its bodies."""

    no_effect: frozenset[str]
    unsupported: Mapping[str, Unsupported]
    prefixes: Mapping[str, Unsupported] = {}
    elsewhere: Mapping[str, str] = {}
    messages: Mapping[str, Unsupported] | None = None
    """Fields of messages in OpenAI's form that are not supported; None if there are no such messages."""


OPENAI = FieldRules(NO_EFFECT, UNSUPPORTED, _PREFIXES, _ELSEWHERE, MESSAGE_FIELDS)
"""The rules of completions, chat, tokenize and detokenize."""


def check(
    fields: RawFields, body: type[msgspec.Struct], no_effect: Iterable[str] = (), rules: FieldRules = OPENAI
) -> None:
    """Raises ServiceError('unsupported_parameter') for the first field that the endpoint of `body` does not support.

    `no_effect`: fields without effect at this endpoint, in addition to those of the rules.
    """
    acting = {*body.__struct_fields__, *no_effect}
    for name, raw in fields.items():
        if name not in acting and name not in rules.no_effect:
            _check_one(name, raw, rules, known_fields(body, rules))
    if rules.messages is not None and "messages" in acting and fields.get("messages", _NOTHING) != _NOTHING:
        _check_messages(fields["messages"], rules.messages)
    if rules is OPENAI and "stream_options" in acting and fields.get("stream_options", _NOTHING) != _NOTHING:
        _check_stream_options(read_any(fields["stream_options"]))


def known_fields(body: type[msgspec.Struct], rules: FieldRules = OPENAI) -> list[str]:
    """Returns all field names that are not refused as unknown."""
    return [*body.__struct_fields__, *rules.no_effect, *rules.unsupported]


def _check_messages(messages: msgspec.Raw, unsupported: Mapping[str, Unsupported]) -> None:
    """Checks the field names of the messages of a conversation, or of each of several conversations."""
    try:
        found = _MESSAGES.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError):
        read_any(messages)  # raises ServiceError for text that is no JSON
        return  # Messages that are not a list of objects are refused when the body is decoded.
    rules = FieldRules(frozenset(), unsupported)
    for number, one in enumerate(found):
        if isinstance(one, list):
            for place, message in enumerate(one):
                _check_message(message, rules, f"messages[{number}][{place}].")
        else:
            _check_message(one, rules, f"messages[{number}].")


def _check_message(message: RawFields, rules: FieldRules, within: str) -> None:
    for name, raw in message.items():
        if name not in Turn.__struct_fields__:
            _check_one(name, raw, rules, known_fields(Turn, rules), within)


def _check_stream_options(options: Any) -> None:
    # Options that are not an object are refused when the body is decoded.
    for name, value in options.items() if isinstance(options, dict) else ():
        if name not in StreamOptions.__struct_fields__ and name not in _STREAM_OPTIONS_NO_EFFECT:
            path, raw = f"stream_options.{name}", msgspec.Raw(msgspec.json.encode(value))
            known = [f"stream_options.{key}" for key in StreamOptions.__struct_fields__]
            _check_one(path, raw, FieldRules(frozenset(), {}), known)


def _check_one(name: str, raw: msgspec.Raw, rules: FieldRules, known: Iterable[str], within: str = "") -> None:
    """Raises ServiceError if the field is unknown, or unsupported with this value.

    `within`: path of the object with the field, if it is not the body itself.
    """
    if raw == _NOTHING:
        return
    prefixes = rules.prefixes
    unsupported = rules.unsupported.get(name) or next((prefixes[one] for one in prefixes if name.startswith(one)), None)
    if unsupported is None:
        raise _unknown(name, known, rules, within)
    value = read_any(raw)
    if any(_same(value, other) for other in unsupported.asks_nothing):
        return
    param = within + _short(name)
    where = f"at this endpoint. {unsupported.instead}" if unsupported.instead else "yet."
    raise ServiceError("unsupported_parameter", f"The parameter '{param}' is not supported {where}", param=param)


def _unknown(name: str, known: Iterable[str], rules: FieldRules, within: str) -> ServiceError:
    if not name:
        return ServiceError("unsupported_parameter", "The request body has a field whose name is empty.")
    shown = _short(name)
    near = difflib.get_close_matches(shown, known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    hint = f" {rules.elsewhere[name]}" if name in rules.elsewhere else hint
    param = within + shown
    return ServiceError(
        "unsupported_parameter", f"Unrecognized request argument supplied: '{param}'.{hint}", param=param
    )


def _short(name: str) -> str:
    return name if len(name) <= limits.FIELD_NAME_CHARS_MAX else name[: limits.FIELD_NAME_CHARS_MAX - 1] + "…"


def _same(value: Any, other: Any) -> bool:
    # False == 0 and True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(other, bool) and value == other
