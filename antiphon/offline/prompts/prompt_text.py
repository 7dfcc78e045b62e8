"""Text processing in this process: prompts to token ids, conversations to prompts, and the vocabulary for outputs.

The code is the same as in the tokenizer and detokenizer services (`antiphon.shared.text`). A chat template is rendered
in this process, in Jinja's sandbox, without the separate worker process of the tokenizer service: the author of the
program chose the model and therefore its template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec

from antiphon.offline.prompts.images import taker, without_pil
from antiphon.offline.prompts.inputs import Prompt
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ImageTokens
from antiphon.shared.models.model_files import model_directory, tokenizer_directory
from antiphon.shared.parameters.context import check_context, fitted
from antiphon.shared.request import conversation
from antiphon.shared.request.checks import check_token_ids
from antiphon.shared.request.images import with_image_texts, with_images
from antiphon.shared.request.tools import checked_documents, checked_template_kwargs, checked_tools
from antiphon.shared.text.bad_words import bad_word_ids
from antiphon.shared.text.codec import EncodedPair, NoCodec, choose_codec, given_template
from antiphon.shared.text.templates.chat_template import ChatTemplate, TemplateFailedError
from antiphon.shared.text.templates.conversation_templates import choose_template
from antiphon.shared.text.templates.score_template import ScorePrompt
from antiphon.shared.text.templates.turns import plain_messages
from antiphon.shared.text.vocabulary import choose_vocabulary

Message = Mapping[str, Any]
_NO_TOKENIZER = "There is no tokenizer ('skip_tokenizer_init'): give prompt_token_ids, and no text."
_NO_TEMPLATE = "This model has no chat template: give 'chat_template' or (to LLM) 'conv_template', or use generate()."


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Arguments of the chat template besides the messages; see `LLM.chat`."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class PromptText:
    """The tokenizer, chat templates and vocabulary of one model. `settings` must be `located`.

    The constructor raises SettingsError for a model directory without a usable tokenizer.
    """

    def __init__(self, settings: EngineSettings, vocab_size: int, max_model_len: int) -> None:
        directory = tokenizer_directory(settings)
        self.vocabulary = choose_vocabulary(settings, directory, model_directory(settings, weights=False))
        self._directory, self._trust_remote_code = directory, settings.trust_remote_code
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._takes_images = settings.enable_mm
        self._codec = choose_codec(settings, directory)
        self._has_tokenizer = not isinstance(self._codec, NoCodec)
        self._facts = choose_template(settings, directory, self._codec) if self._has_tokenizer else None
        self._score_template = self._facts.chat_template if settings.chat_template and self._facts else None
        self._compiled = lru_cache(maxsize=8)(self._compile)

    def token_ids(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int = 0,
        generates: bool = True,
        images: Sequence[ImageTokens] = (),
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns a prompt's truncated token ids, and the index of each image's first token.

        `truncate_prompt_tokens` is as for `truncated`; for pooling it is the number of first tokens to keep (0: all).

        Raises ValueError if the prompt is invalid or too long, or does not contain one image token for each of its
        `images`. The prompt and `max_tokens` output tokens (one, if `max_tokens` is 0) must fit into the context. A
        prompt that does not generate output (`generates` is false) may fill the context.
        """
        keep_first = 0 if generates else truncate_prompt_tokens
        if prompt.token_ids is not None:
            ids = prompt.token_ids
            _as_value_error(check_token_ids, ids, self._vocab_size, "prompt_token_ids")
        else:
            if not self._has_tokenizer:
                raise ValueError(_NO_TOKENIZER)
            assert prompt.text is not None
            text = self._with_image_texts(prompt.text, images) if images else prompt.text
            encode: Any = self._codec.encode
            ids = tuple(_as_value_error(encode, [text], add_special_tokens=add_special_tokens, keep=keep_first)[0])
            if not ids:
                raise ValueError("The prompt has no tokens.")
        if images and truncate_prompt_tokens:
            raise ValueError("'truncate_prompt_tokens' cannot be given with images, which could be cut.")
        room = truncate_prompt_tokens, max_tokens, self._max_model_len
        place = partial(self._with_images, images=images) if images else None
        return _as_value_error(fitted, ids, *room, "prompt", generates=generates, place=place)

    def pair_ids(self, prompt: Prompt, keep: int = 0) -> tuple[tuple[int, ...], int]:
        """Returns the token ids of a pair of texts, and `PoolingParams.num_first_tokens`.

        `keep`: largest number of tokens of the pair, see `Codec.encode`. Raises ValueError.
        """
        assert prompt.text is not None
        assert prompt.second_text is not None
        texts = prompt.text, prompt.second_text
        source = given_template(prompt.score_template) if prompt.score_template else self._score_template
        if source is not None:
            pair = EncodedPair(self._by_template(source, texts, keep), 0)
        else:
            encode: Any = self._codec.encode_pairs
            [pair] = _as_value_error(encode, [texts], add_special_tokens=True, keep=keep)
        _as_value_error(check_context, len(pair.token_ids), 0, self._max_model_len, "prompt", generates=False)
        return tuple(pair.token_ids), pair.num_first

    def _by_template(self, source: str, texts: tuple[str, str], keep: int) -> list[int]:
        """Returns the token ids of a pair, rendered by a score template. Raises ValueError."""
        if self._facts is None:
            raise ValueError(_NO_TOKENIZER)
        bos = self._facts.named_tokens.get("bos_token", "")
        prompt = ScorePrompt(self._codec, texts, keep=keep, add_special_tokens=True, bos=bos)
        token_ids: list[int] | None = None
        while token_ids is None:
            try:
                text = self._compiled(source).render(prompt.messages, add_generation_prompt=False)
            except TemplateFailedError as error:
                raise ValueError(str(error)) from None
            token_ids = _as_value_error(prompt.token_ids, text)
        return token_ids

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token ids of the `bad_words`. Raises ValueError."""
        if words and not self._has_tokenizer:
            raise ValueError(_NO_TOKENIZER)
        return bad_word_ids(self._codec, words)

    def rendered(self, messages: Sequence[Message], options: TemplateOptions) -> Prompt:
        """Returns a conversation rendered to text by the chat template, including special tokens. Raises ValueError.

        Without a template in the options, the model's own is used, which may have further end tokens. The images of the
        messages become those of the prompt.
        """
        if not self._has_tokenizer or self._facts is None:
            raise ValueError(_NO_TOKENIZER)
        images: list[Any] = []
        taken: list[Any] = []
        turns = _turns(without_pil(messages, images))
        take = taker(images, taken, enabled=self._takes_images)
        checked = _as_value_error(conversation.messages, turns, self._vocab_size, take)
        variables = _as_value_error(_variables, options)
        if options.continue_final_message:
            if options.add_generation_prompt:
                raise ValueError("'continue_final_message' needs add_generation_prompt=False.")
            _as_value_error(conversation.check_continuable, turns[-1], len(turns) - 1)
        given = options.chat_template
        source = self._facts.template(bool(options.tools)) if given is None else given_template(given)
        if source is None:
            raise ValueError(_NO_TEMPLATE)
        plain = _as_value_error(plain_messages, self._codec, checked)
        try:
            text = self._compiled(source).render(
                plain,
                options.add_generation_prompt,
                variables,
                continue_final_message=options.continue_final_message,
            )
        except TemplateFailedError as error:
            raise ValueError(str(error)) from None
        return Prompt(text=text, end_token_ids=self._facts.end_token_ids if given is None else (), images=tuple(taken))

    def transformers_tokenizer(self) -> Any:
        """Returns the tokenizer as a transformers object. Raises ValueError if there is no tokenizer."""
        if not self._has_tokenizer:
            raise ValueError(_NO_TOKENIZER)
        from transformers import AutoTokenizer  # imported here: the import takes a second and is rarely needed

        return AutoTokenizer.from_pretrained(self._directory, trust_remote_code=self._trust_remote_code)

    def _with_image_texts(self, text: str, images: Sequence[ImageTokens]) -> str:
        if images[0].place:
            _check_places(text.count(images[0].place), len(images), images[0].place)
        return with_image_texts(text, images)

    def _with_images(
        self, token_ids: Sequence[int], images: Sequence[ImageTokens]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stands_for = images[0].token_id
        token = self._codec.token_text(stands_for) if self._has_tokenizer else str(stands_for)
        _check_places(token_ids.count(stands_for), len(images), token)
        ids, starts = with_images(list(token_ids), images)
        return tuple(ids), starts

    def _compile(self, source: str) -> ChatTemplate:
        assert self._facts is not None
        return ChatTemplate(source, self._facts.named_tokens, limits.TEMPLATE_OUTPUT_CHARS_MAX)


def _check_places(num_places: int, num_images: int, token: str) -> None:
    if num_places != num_images:
        raise ValueError(
            f"The prompt has {num_places} places for {num_images} images. The model's own token for an image, "
            f"{token!r}, must be in it once for each. chat() writes it by the chat template."
        )


def _variables(options: TemplateOptions) -> dict[str, Any]:
    variables = checked_template_kwargs(options.chat_template_kwargs)
    if options.tools:
        variables["tools"] = checked_tools(options.tools)
    if options.documents:
        variables["documents"] = checked_documents(options.documents)
    return variables


def _turns(messages: Sequence[Message]) -> list[conversation.Turn]:
    for number, message in enumerate(messages):
        for name, value in message.items():
            if name not in conversation.Turn.__struct_fields__ and value is not None:
                raise ValueError(f"messages[{number}] has an unknown field: {name!r}.")
    try:
        return msgspec.convert([dict(message) for message in messages], list[conversation.Turn])
    except msgspec.ValidationError as error:
        raise ValueError(f"messages: {error}") from None


def _as_value_error(check: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return check(*arguments, **named)
    except ServiceError as error:
        raise ValueError(error.message) from None
