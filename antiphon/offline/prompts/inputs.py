"""Converts the prompts and sampling parameters of a call to a uniform type. Without side effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from antiphon.offline.prompts.engine_form import FIELDS as ENGINE_FIELDS
from antiphon.offline.prompts.engine_form import NO_FORM, EngineForm, engine_form
from antiphon.offline.prompts.images import images_of

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
PromptInput = str | Mapping[str, Any]
"""A text, or a dict with `prompt` (a text) or `prompt_token_ids` (a list of ids), and `multi_modal_data`."""
PromptInputs = PromptInput
"""The name of `PromptInput` in programs for other servers."""
TokenIds = Sequence[int] | Sequence[Sequence[int]]
_FIELDS = frozenset({"prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: text, token ids, or both. With both, the ids are used and the text is only repeated in the result.

    `end_token_ids`: end tokens of the conversation template that produced the text. `images`: the images, in the
    order of their image tokens in the prompt.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    end_token_ids: tuple[int, ...] = ()
    second_text: str | None = None
    """The second text of a pair, which forms one prompt together with `text`."""
    score_template: str | None = None
    """The score template of a pair (a file or its text); None: the template of the engine's arguments."""
    images: "tuple[bytes | Image, ...]" = ()
    is_chat: bool = False
    """Whether the text was rendered by a chat template, special tokens included."""
    form: EngineForm = NO_FORM


def prompts_of(
    prompts: PromptInput | Sequence[PromptInput] | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    *,
    takes_engine_form: bool = False,
) -> list[Prompt]:
    """Returns the prompts of a call. Raises ValueError or TypeError, which names an invalid prompt by its index.

    `takes_engine_form`: a dict may also have the fields of an engine's request (`EngineForm`).
    """
    read = _request if takes_engine_form else _prompt
    texts = None if prompts is None else [read(one, index) for index, one in enumerate(_listed(prompts))]
    if prompt_token_ids is None:
        if texts is None:
            raise ValueError("Give prompts, or prompt_token_ids.")
        return texts
    ids = [_ids(one, f"prompt_token_ids[{index}]") for index, one in enumerate(_id_lists(prompt_token_ids))]
    if texts is None:
        return [Prompt(token_ids=one) for one in ids]
    if len(texts) != len(ids):
        raise ValueError(f"There are {len(texts)} prompts and {len(ids)} prompt_token_ids: give as many of both.")
    return [replace(prompt, token_ids=one) for prompt, one in zip(texts, ids, strict=True)]


def paired(
    values: T | Sequence[T | None] | None, kind: type[T], count: int, name: str, *, takes_none: bool = False
) -> list[T | None]:
    """Returns one value for each of `count` prompts. `values` is a single value for all, a list of `count`, or None.

    `takes_none`: items of the list may be None. Raises ValueError for a list of another length, TypeError for values
    that are not of type `kind`.
    """
    if values is None or isinstance(values, kind):
        return [values] * count
    if not isinstance(values, Sequence) or not all(isinstance(o, kind) or (takes_none and o is None) for o in values):
        listed = "a list of them (or None)" if takes_none else "a list of them"
        raise TypeError(f"{name} must be a {kind.__name__}, {listed}, or None, not {values!r}")
    if len(values) != count:
        raise ValueError(f"There are {count} prompts and {len(values)} {name}: give one, or as many as prompts.")
    return list(values)


def _listed(prompts: PromptInput | Sequence[PromptInput]) -> Sequence[PromptInput]:
    return [prompts] if isinstance(prompts, str | Mapping) else prompts


def _request(prompt: PromptInput, index: int) -> Prompt:
    more = ENGINE_FIELDS - _FIELDS
    if not isinstance(prompt, Mapping) or more.isdisjoint(prompt):
        return _prompt(prompt, index)
    try:
        form = engine_form(prompt)
    except ValueError as error:
        raise ValueError(f"prompts[{index}]: {error}") from None
    plain = {name: value for name, value in prompt.items() if name not in more}
    if form.messages:
        # The text of a conversation is rendered later, by the model's template.
        plain["prompt"] = ""
    return replace(_prompt(plain, index), form=form)


def _prompt(prompt: PromptInput, index: int) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if not isinstance(prompt, Mapping):
        raise TypeError(f"prompts[{index}] must be a text or a dict, not {type(prompt).__name__}")
    unknown = set(prompt) - _FIELDS
    if unknown:
        raise ValueError(
            f"prompts[{index}] has {', '.join(sorted(map(repr, unknown)))}: known are 'prompt', "
            "'prompt_token_ids' and 'multi_modal_data'."
        )
    if prompt.get("mm_processor_kwargs"):
        raise ValueError(f"prompts[{index}]: 'mm_processor_kwargs' are those of all prompts: give them to LLM.")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError(f"prompts[{index}] needs 'prompt' or 'prompt_token_ids'.")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompts[{index}]: 'prompt' must be a text, not {type(text).__name__}")
    found = None if ids is None else _ids(ids, f"prompts[{index}]: 'prompt_token_ids'")
    images = images_of(prompt.get("multi_modal_data"), f"prompts[{index}]: 'multi_modal_data'")
    return Prompt(text=text, token_ids=found, images=images)


def _id_lists(token_ids: TokenIds) -> Sequence[Any]:
    return [token_ids] if all(isinstance(one, int) for one in token_ids) else token_ids


def _ids(ids: Any, what: str) -> tuple[int, ...]:
    if isinstance(ids, str) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise TypeError(f"{what} must be a list of token ids")
    if not ids:
        raise ValueError(f"{what} must not be empty.")
    return tuple(ids)
