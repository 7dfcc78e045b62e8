"""Renders the body of a request again, with the template and the tokenizer of a model's directory, as a server does.

It uses the conversion of OpenAI's API and of the tokenizers. Bodies of other APIs are not rendered: those of
`/v1/responses` may name what only their server has. For these there is the evidence.
"""

import json
from typing import Any, cast

from msgspec.structs import replace

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.parameters import DEFAULTS
from antiphon.services.gateway.apis.openai.chat import chat_request
from antiphon.services.gateway.apis.openai.completions import completion_request
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.requests.preparation import tokenize_message
from antiphon.services.tokenizer.requests import tokenize
from antiphon.shared import limits
from antiphon.shared.codec import unpack_ids
from antiphon.shared.config import EngineSettings, GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import tokenizer_directory
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.text.codec import choose_codec
from antiphon.shared.text.digests import template_digest, tokenizer_digest
from antiphon.shared.text.templates.chat_template import ChatTemplate, TemplateFailedError
from antiphon.shared.text.templates.conversation_templates import choose_template
from antiphon.shared.text.templates.template_formats import reasoning_format, tool_format
from antiphon.shared.text.templates.turns import json_object, plain_messages

_COMPARED = (
    "temperature", "top_p", "top_k", "min_p", "top_a", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "seed",
)  # fmt: skip
"""Parameters that a server must take from a request as they are."""


class PromptRenderer:
    """The tokenizer and the template of a model. `settings`: located. Raises SettingsError if there is no tokenizer."""

    def __init__(self, settings: EngineSettings, max_model_len: int, vocab_size: int) -> None:
        directory = tokenizer_directory(settings)
        self._codec = choose_codec(settings, directory)
        self._facts = choose_template(settings, directory, self._codec)
        self.tokenizer_digest, self.template_digest = tokenizer_digest(directory), template_digest(self._facts)
        self._card = ModelCard(
            name="model",
            path=settings.model,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            created=0,
            tool_format=tool_format(self._facts.template(True) or ""),
            reasoning_format=reasoning_format(self._facts.template(False) or ""),
        )

    def rendered(self, body: bytes) -> tuple[list[list[int]], GenerationRequest]:
        """Returns the token ids of each prompt of a request's body, and the converted request.

        Raises ServiceError if the request is invalid, and SettingsError if it is one of another API.
        """
        request = self._converted(body)
        inputs = request.inputs
        prompts = [list(one) for one in inputs.token_ids]
        if not (inputs.texts or inputs.messages):
            return prompts, request
        message = tokenize_message(request, self._card, 0)
        texts = message.prompts
        if inputs.messages:
            text = self._conversation(request)
            texts = (text,)
            bos = self._facts.named_tokens.get("bos_token", "")
            if bos and text.startswith(bos):
                # The template has added the token, so the tokenizer must not add it again.
                message = replace(message, add_special_tokens=False)
        reply = tokenize(self._codec, message, texts)
        return [unpack_ids(one.token_ids) for one in reply.prompts] + prompts, request

    def _converted(self, body: bytes) -> GenerationRequest:
        named = _object(body)
        if "messages" in named:
            data = request_fields.read(body, schemas.CHAT_DECODER)
            return chat_request(data, self._card, "", DEFAULTS, GatewaySettings()).request
        if "prompt" in named:
            return completion_request(request_fields.read(body, schemas.COMPLETION_DECODER), self._card, "")
        raise SettingsError("--request: it has neither 'messages' nor 'prompt': leave it out and use the evidence")

    def _conversation(self, request: GenerationRequest) -> str:
        inputs = request.inputs
        variables = json_object(inputs.template_variables, "chat_template_kwargs")
        source = self._facts.template(bool(variables.get("tools")))
        if source is None:
            raise ServiceError(
                "invalid_value", "The model has no chat template, by which the request could be rendered."
            )
        try:
            template = ChatTemplate(source, self._facts.named_tokens, limits.TEMPLATE_OUTPUT_CHARS_MAX)
            return template.render(
                plain_messages(self._codec, inputs.messages),
                inputs.add_generation_prompt,
                variables,
                continue_final_message=inputs.continue_final_message,
            )
        except TemplateFailedError as error:
            raise ServiceError("invalid_value", f"The template cannot render the request: {error}") from None


def first_changed(body: bytes, request: GenerationRequest, told: SamplingParams) -> str:
    """Returns how the parameters of the first output differ from those that a body gives; "" if they do not."""
    given = _object(body)
    for name in _COMPARED:
        asked, used = getattr(request.params, name), getattr(told, name)
        if given.get(name) is not None and asked != used:
            return f"the request asks for {name} {asked}, and the receipt says {used}"
    return ""


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise ServiceError("invalid_value", f"The request is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ServiceError("invalid_value", "The request is no JSON object.")
    return cast(dict[str, Any], found)
