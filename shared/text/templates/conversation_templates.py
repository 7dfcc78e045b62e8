"""Named conversation templates: the layouts of model series whose tokenizers have no chat template.

`choose_template` selects the template of a model's conversations, in this order: the template of `--chat-template`; the
named one of `--conv-template` (or CONV_TEMPLATE, or the model's `ti_model_config.json`, which
`antiphon.shared.models.model_files.described` fills in); the tokenizer's own; a named one that the model's name
suggests. The layouts are Jinja files in this folder, rendered like every other chat template. A layout writes all
special tokens itself, the first one of the prompt included.

Called by the tokenizer service and the offline API at start-up.
"""

import re
from dataclasses import replace
from pathlib import Path

from antiphon.shared.config import ModelSettings
from antiphon.shared.text.codec import Codec, TextFacts, load_facts

DIRECTORY = Path(__file__).parent
_END_TOKENS: dict[str, dict[int, str]] = {
    "llama-3": {128001: "<|end_of_text|>", 128009: "<|eot_id|>"},
    "qwen-7b-chat": {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"},
    "chatglm3": {2: "</s>", 64795: "<|user|>", 64797: "<|observation|>"},
}
"""Tokens that end an answer in a layout, besides the model's own end tokens."""
_SERIES: tuple[tuple[str, str], ...] = (
    (r"baichuan-?2.*chat", "baichuan2-chat"),
    (r"baichuan.*chat", "baichuan-chat"),
    (r"chatglm-?3", "chatglm3"),
    (r"chatglm-?2", "chatglm2"),
    (r"llama-?3(?!\d).*(instruct|chat)", "llama-3"),
    (r"llama-?2(?!\d).*chat", "llama-2"),
    (r"qwen.*(chat|instruct)", "qwen-7b-chat"),
)
"""Patterns of model names (lower case, with "-" for "_") and the template of the series. The first match counts."""
_BASE_MODEL = re.compile(r"(^|-)base($|-)")


def choose_template(settings: ModelSettings, directory: Path, codec: Codec) -> TextFacts:
    """Returns the named tokens, the chat template and the further end tokens of a model.

    `settings` must be `described`; `directory` is the tokenizer's. Raises SettingsError for a template that cannot be
    read.
    """
    facts = load_facts(directory, settings.chat_template)
    name = "" if settings.chat_template else settings.conv_template or ""
    if facts.chat_template is None and not name:
        name = guess(settings)
    if not name:
        return facts
    end_tokens = _END_TOKENS.get(name, {})
    return replace(
        facts,
        chat_template=template_text(name),
        tool_template=None,
        conv_template=name,
        end_token_ids=tuple(i for i, text in end_tokens.items() if codec.has_token(i, text)),
    )


def template_text(name: str) -> str:
    """Returns the Jinja source of a named template."""
    return (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")


def guess(settings: ModelSettings) -> str:
    """Returns the name of the template that is inferred from the model's names; '' if there is none.

    The names are, in this order: the model id, the served name, and the last part of the model's path or hub name. A
    base model has no template.
    """
    for name in (settings.model_id, settings.served_model_name, Path(settings.model).name):
        plain = name.lower().replace("_", "-")
        found = next((template for pattern, template in _SERIES if re.search(pattern, plain)), "")
        if found and not _BASE_MODEL.search(plain):
            return found
    return ""
