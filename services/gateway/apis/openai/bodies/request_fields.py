"""Which fields a request may have, in every API: the one table of what acts, what is a hint and what is required.

- A field of the endpoint's schema acts.
- A mapped field is another server's name of one that acts, or of a part of one.
- A hint is the client's bookkeeping, or asks for speed or display: the answer is as good without it.
- A requirement is a field without which the answer would be wrong in a way that the client cannot see. It is refused,
  unless its value asks for nothing.
- An unknown field is treated as a hint.

What a request asks and does not get is told in the response header `X-Antiphon-Ignored`, in the request's timeline and
in the log (`access.call.ignore`). With `--unknown-parameters=refuse`, an unknown field is refused with the most similar
name. A misspelt field of structured output or of a beam search is refused always. null counts as the default for every
name.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from antiphon.services.gateway.apis.openai.body import StreamOptions
from antiphon.services.gateway.apis.openai.schemas import ChatBody, CompletionBody
from antiphon.services.gateway.edge.access.call import current_call, ignore, name_call
from antiphon.services.gateway.edge.http.request_body import RawFields, read_any, read_body, read_fields
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.conversation import Turn

T = TypeVar("T", bound=msgspec.Struct)
HINTS = frozenset(
    {
        # the client's own bookkeeping, which does not change the answer
        "metadata",
        "safety_identifier",
        "store",
        "user",
        # performance: prefixes are cached without a key, draft tokens come from the request's own text
        "cache_prompt",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        # how the answer is worded or shown, which is up to the model and the client
        "verbosity",
        # tools that the server would run: the model is not told of them
        "web_search_options",
        # what only another server's own parts use
        "kv_transfer_params",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "moderation",
        "vllm_xargs",
    }
)
"""Hints of OpenAI's and vLLM's clients. Their names are known, so that they are accepted also in the strict mode."""


class Requirement(NamedTuple):
    """A field that other servers have, without which the answer would be wrong, and which this server cannot serve."""

    asks_nothing: tuple[Any, ...]
    """Values without effect (the default), which are accepted."""
    instead: str = ""
    """A sentence for the error message that says what to do instead."""


_OFF = Requirement((None, False))
_EMPTY = Requirement((None, [], {}, ""))
_NULL = Requirement((None,))
_NATIVE = Requirement((None,), "Send it to /generate.")
REQUIREMENTS: Mapping[str, Requirement] = {
    "suffix": Requirement((None, ""), "Send it to /v1/completions."),
    "logits_processors": _EMPTY,
    "audio": _NULL,
    "modalities": Requirement((None, [], ["text"])),
    "chat_template": _NULL,
    "multi_modal_inputs": _EMPTY,
    "prompt_embeds": _NULL,
    "system": Requirement((None,), "Send a message with the role 'system' to /v1/chat/completions."),
    "history": Requirement((None,), "Send the conversation in 'messages' to /v1/chat/completions."),
    "prompt_token_ids": Requirement((None,), "Send the token ids in 'prompt' to /v1/completions."),
    "sampling_params": Requirement((None,), "Send its members as fields of the request."),
    "prompt_token_ids_len": _NATIVE,
    "arrival_time": _NATIVE,
    "preprocess_start_time": _NATIVE,
    "preprocess_end_time": _NATIVE,
}
MISSPELT: Mapping[str, Requirement] = {
    "guided_": _OFF,
    "beam_": Requirement((None, False), "Give 'use_beam_search' and 'best_of'."),
}
"""All unknown names with one of these prefixes are refused: they ask for a form of the output."""
MAPPED: Mapping[str, str] = {
    # llama.cpp
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
    "grammar": "guided_grammar",
    # SGLang
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    # vLLM
    "request_id": "X-Request-Id",
    # routers and chat programs
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "think": "chat_template_kwargs.enable_thinking",
    "thinking_budget": "thinking_token_budget",
    "reasoning.max_tokens": "thinking_token_budget",
    "reasoning.effort": "reasoning_effort",
    "reasoning.enabled": "chat_template_kwargs.enable_thinking",
}
"""Names that other servers have for fields that act here. `X-Request-Id` is a header, `a.b` is a member of a field."""
_HEADER = "X-Request-Id"
_UNLIMITED = "max_tokens"
_ONLY_CHAT = [name for name in ChatBody.__struct_fields__ if name not in CompletionBody.__struct_fields__]
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(_ONLY_CHAT, "Conversations go to /v1/chat/completions."),
    "input": "Texts to embed go to /v1/embeddings.",
    "prompt": "Prompts go to /v1/completions.",
    "tokens": "Token ids go to /detokenize.",
}
"""A sentence for the error message about a field that acts only at another endpoint: there it says what to answer."""
_STREAM_HINTS = frozenset({"include_obfuscation"})
_MESSAGE_HINTS = frozenset({"annotations", "audio", "refusal", "weight"})
_MESSAGE_REQUIREMENTS: Mapping[str, Requirement] = {
    "prefix": Requirement((None, False), "Set 'continue_final_message' of the request."),
    "partial": Requirement((None, False), "Set 'continue_final_message' of the request."),
}
_MESSAGES = msgspec.json.Decoder(list[RawFields | list[RawFields]])
_NOTHING: msgspec.Raw = msgspec.Raw(b"null")
_ASKS_NOTHING = [msgspec.Raw(text) for text in (b"null", b"[]", b"{}", b'""', b"false")]
"""Values of a hint that need not be told."""


class FieldRules(NamedTuple):
    """The fields of one API, besides those of the schemas of its bodies, which act."""

    hints: frozenset[str] = frozenset()
    requirements: Mapping[str, Requirement] = {}
    misspelt: Mapping[str, Requirement] = {}
    elsewhere: Mapping[str, str] = {}
    mapped: Mapping[str, str] = {}
    messages: "FieldRules | None" = None
    """The fields of messages besides those of `message`; None if there are none, or others check them."""
    message: type[msgspec.Struct] = Turn
    is_strict: bool = False
    """Whether unknown fields are refused always."""


OPENAI = FieldRules(
    HINTS,
    REQUIREMENTS,
    MISSPELT,
    _ELSEWHERE,
    MAPPED,
    FieldRules(_MESSAGE_HINTS, _MESSAGE_REQUIREMENTS),
)
"""The rules of completions, chat, tokenize and detokenize."""
OWN = FieldRules(is_strict=True)
"""The rules of this server's own endpoints, which no client calls that was written for another server."""


def read(
    data: bytes, decoder: "msgspec.json.Decoder[T]", rules: FieldRules = OPENAI, *, without_effect: Iterable[str] = ()
) -> T:
    """Returns the body of a request as a struct, with mapped fields under their names here. Tells its hints.

    `without_effect`: fields that clients send to this endpoint because another one has them; they are not told. Raises
    ServiceError for what is no object, for the first field that is refused, and for a value of a wrong type.
    """
    fields = read_fields(data)
    flat = _flat(fields, decoder.type, rules)
    renamed = flat if rules.mapped.keys().isdisjoint(flat) else _renamed(flat, decoder.type, rules)
    renamed = None if renamed is fields else renamed
    check(fields if renamed is None else renamed, decoder.type, rules, without_effect)
    return read_body(data if renamed is None else msgspec.json.encode(renamed), decoder)


def check(
    fields: RawFields,
    body: type[msgspec.Struct],
    rules: FieldRules = OPENAI,
    without_effect: Iterable[str] = (),
    within: str = "",
) -> None:
    """Tells the hints among fields, and raises ServiceError for the first that is refused. See `read`.

    `within`: path of the object with the fields, if it is not the body itself.
    """
    acting = {*body.__struct_fields__, *without_effect}
    for name, raw in fields.items():
        if name not in acting:
            _check_one(name, raw, rules, known_fields(body, rules), within)
    if rules.messages is not None and "messages" in acting and fields.get("messages", _NOTHING) != _NOTHING:
        _check_messages(fields["messages"], rules.messages, rules.message)
    if rules is OPENAI and "stream_options" in acting and fields.get("stream_options", _NOTHING) != _NOTHING:
        _check_stream_options(read_any(fields["stream_options"]))


def known_fields(body: type[msgspec.Struct], rules: FieldRules = OPENAI) -> list[str]:
    """Returns all field names that are not unknown."""
    return [*body.__struct_fields__, *rules.hints, *rules.requirements, *rules.mapped]


def _flat(fields: RawFields, body: type[msgspec.Struct], rules: FieldRules) -> RawFields:
    """Returns the fields with the members of objects that only other servers have in place of these objects."""
    acting = body.__struct_fields__
    members = [name for name, target in rules.mapped.items() if "." in name and target.partition(".")[0] in acting]
    parents = {name.partition(".")[0] for name in members}.intersection(fields).difference(acting)
    objects = {name: fields[name] for name in parents if bytes(fields[name]).startswith(b"{")}
    if not objects:
        return fields
    flat = {name: raw for name, raw in fields.items() if name not in objects}
    for parent, raw in objects.items():
        flat |= {f"{parent}.{name}": member for name, member in read_fields(bytes(raw)).items()}
    return flat


def _renamed(fields: RawFields, body: type[msgspec.Struct], rules: FieldRules) -> RawFields:
    """Returns the fields with the names that they have here; the same object if none is mapped."""
    wanted = [name for name in fields if name in rules.mapped and name not in body.__struct_fields__]
    if not wanted:
        return fields
    renamed = dict(fields)
    for name in wanted:
        raw, target = renamed.pop(name), rules.mapped[name]
        parent, _, member = target.partition(".")
        if target == _HEADER:
            name_call(read_any(raw))
        if raw == _NOTHING or parent not in body.__struct_fields__:
            continue
        if target == _UNLIMITED and bytes(raw).startswith(b"-"):
            continue  # as many as fit, which is what a request without the field gets in a conversation
        if not member and renamed.get(target, _NOTHING) == _NOTHING:
            renamed[target] = raw
        elif member and member not in (inner := _object(renamed.get(parent, _NOTHING))):
            renamed[parent] = msgspec.Raw(msgspec.json.encode({**inner, member: raw}))
        else:
            ignore(name)  # the request has the field under its own name too
    return renamed


def _object(raw: msgspec.Raw) -> RawFields:
    return {} if raw == _NOTHING else read_fields(bytes(raw))


def _check_messages(messages: msgspec.Raw, rules: FieldRules, body: type[msgspec.Struct]) -> None:
    """Checks the field names of the messages of a conversation, or of each of several conversations."""
    try:
        found = _MESSAGES.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError):
        read_any(messages)  # raises ServiceError for text that is no JSON
        return  # Messages that are not a list of objects are refused when the body is decoded.
    for number, one in enumerate(found):
        if isinstance(one, list):
            for place, message in enumerate(one):
                _check_message(message, rules, body, f"messages[{number}][{place}].")
        else:
            _check_message(one, rules, body, f"messages[{number}].")


def _check_message(message: RawFields, rules: FieldRules, body: type[msgspec.Struct], within: str) -> None:
    for name, raw in message.items():
        if name not in body.__struct_fields__:
            _check_one(name, raw, rules, known_fields(body, rules), within)


def _check_stream_options(options: Any) -> None:
    # Options that are not an object are refused when the body is decoded.
    for name, value in options.items() if isinstance(options, dict) else ():
        if name not in StreamOptions.__struct_fields__:
            raw = msgspec.Raw(msgspec.json.encode(value))
            _check_one(name, raw, FieldRules(_STREAM_HINTS), StreamOptions.__struct_fields__, "stream_options.")


def _check_one(name: str, raw: msgspec.Raw, rules: FieldRules, known: Iterable[str], within: str = "") -> None:
    """Tells a hint. Raises ServiceError if the field is refused.

    `within`: path of the object with the field, if it is not the body itself.
    """
    if raw == _NOTHING:
        return
    required = rules.requirements.get(name)
    if required is None and name not in rules.hints:
        required = next((rules.misspelt[one] for one in rules.misspelt if name.startswith(one)), None)
    if required is not None:
        _require(name, raw, required, within)
    elif name in rules.hints:
        if raw not in _ASKS_NOTHING:
            ignore(within + name)
    elif name in rules.elsewhere or not name or rules.is_strict or current_call().strict.unknown_fields:
        raise _unknown(name, known, rules, within)
    else:
        ignore(within + _short(name))


def _require(name: str, raw: msgspec.Raw, required: Requirement, within: str) -> None:
    value = read_any(raw)
    if any(_same(value, other) for other in required.asks_nothing):
        return
    param = within + _short(name)
    where = f"at this endpoint. {required.instead}" if required.instead else "yet."
    raise ServiceError("unsupported_parameter", f"The parameter '{param}' is not supported {where}", param=param)


def _unknown(name: str, known: Iterable[str], rules: FieldRules, within: str) -> ServiceError:
    if not name:
        return ServiceError("unsupported_parameter", "The request body has a field whose name is empty.")
    shown = _short(name)
    near = difflib.get_close_matches(shown, [*known], n=1)
    hint = f" Did you mean '{within}{near[0]}'?" if near else ""
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
