"""Reads prompts in the form of an engine's request, which `/generate` takes too: an id, a conversation, times. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import check_request_id, check_token_ids_len, missing, preprocess_s, refuse
from antiphon.shared.request.conversation import Turn, turns_of_history, with_system


class _Form(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of the form, without any prompt. See `EngineBody` in `services/gateway/apis/native/schemas.py`."""

    request_id: str | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_token_ids_len: int | None = None
    messages: list[dict[str, Any]] | None = None
    history: list[list[str]] | None = None
    system: str | None = None
    eos_token_ids: list[int] | None = None
    arrival_time: float | None = None
    preprocess_start_time: float | None = None
    preprocess_end_time: float | None = None


FIELDS = frozenset(_Form.__struct_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """What such a request says besides its prompt.

    `messages`: its conversation, empty if its input is a prompt. The result repeats `request_id` and `arrival_time`
    (Unix time); `preprocess_s` is the time of the caller's own preprocessing.
    """

    request_id: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    arrival_time: float | None = None
    preprocess_s: float | None = None


NO_FORM = EngineForm()


def engine_form(fields: Mapping[str, Any]) -> EngineForm:
    """Checks the fields of a request and returns what they say. Raises ValueError, which names the field."""
    try:
        form = msgspec.convert({name: fields[name] for name in FIELDS & set(fields)}, _Form)
        if form.request_id is not None:
            check_request_id(form.request_id)
        check_token_ids_len(form.prompt_token_ids_len, form.prompt_token_ids)
        if form.arrival_time is not None and form.arrival_time < 0:
            refuse("arrival_time", "must not be negative")
        return EngineForm(
            request_id=form.request_id or "",
            messages=tuple(_conversation(form)),
            eos_token_ids=None if form.eos_token_ids is None else tuple(form.eos_token_ids),
            arrival_time=form.arrival_time,
            preprocess_s=preprocess_s(form.preprocess_start_time, form.preprocess_end_time),
        )
    except ServiceError as error:
        raise ValueError(error.message) from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _conversation(form: _Form) -> Sequence[Mapping[str, Any]]:
    if form.messages is not None:
        for name in ("prompt", "prompt_token_ids", "prompt_token_ids_len", "history"):
            if getattr(form, name) is not None:
                refuse(name, "cannot be given together with 'messages'")
        roles = [Turn(role=str(message.get("role"))) for message in form.messages]
        before = _plain(with_system(form.system, roles)[: int(form.system is not None)])
        return [*before, *form.messages]
    if form.history is None and form.system is None:
        return []
    if form.prompt_token_ids is not None:
        refuse("prompt_token_ids", "cannot be given together with 'history' or 'system'")
    if form.prompt is None:
        missing("prompt")
    return _plain(with_system(form.system, turns_of_history(form.history or (), form.prompt)))


def _plain(turns: Sequence[Turn]) -> list[Mapping[str, Any]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]
