"""Trains the byte-level BPE tokenizer and writes its HF files; renders conversations.

The server does not use this module. Called by ``batches.py``, ``generate.py`` and ``export.py``, and by hand to train:
``python -m infra.demo_model.tokenizer``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon.shared.text.templates.chat_template import ChatTemplate
from infra.demo_model.exercises.tasks import conversation
from infra.demo_model.sample import Message, Tool
from infra.demo_model.texts.corpus import plain_text, tokenizer_prose

DEMO = Path(__file__).resolve().parents[2] / "antiphon" / "demo"
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, START, END)
VOCABULARY = 4096
MAX_LENGTH = 2048

#: Tools, calls and results are written in Hermes' form; without tools
#: the text is that of ``render``.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}"
    "{{- 'You may call functions. Their signatures are in <tools></tools>:\\n<tools>\\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}"
    "{{- '</tools>\\nFor each call, answer with a JSON object in <tool_call></tool_call>:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
    "\\n</tool_call><|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- elif not (tools and loop.first and message['role'] == 'system') -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n' -}}{{- call['function'] | tojson -}}{{- '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@lru_cache(maxsize=1)
def _template() -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATE, {}, 100_000)


def render(messages: Sequence[Message], prompt: bool = False, tools: Sequence[Tool] = ()) -> str:
    """The text that ``CHAT_TEMPLATE`` renders; ``prompt`` adds the beginning of the answer.

    Without tools and their results the text is built here, which is faster than Jinja.
    """
    if tools or any(message["role"] == "tool" for message in messages):
        return _template().render(messages, prompt, {"tools": list(tools)})
    turns = (f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
    return "".join(turns) + (f"{START}assistant\n" if prompt else "")


def _bare_conversation(rng: Random) -> str:
    return "\n".join(message["content"] for message in conversation(rng))


def training_texts(seed: int, chats: int = 60_000, plains: int = 6_000, prose: int = 1_500_000) -> Iterator[str]:
    """The training texts of the tokenizer: tasks, stories and some docstrings."""
    rng = Random(seed)
    for _ in range(chats):
        yield _bare_conversation(rng)
    for _ in range(plains):
        yield plain_text(rng)
    yield from tokenizer_prose(prose)
    for role in ("system", "user", "assistant") * 300:
        yield f"{role}\n"


def train(seed: int) -> Tokenizer:
    """Byte-level BPE in which every digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(seed), trainer)
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _added(tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in SPECIALS}


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": END, "pad_token": END_OF_TEXT}
    config = {
        "added_tokens_decoder": _added(tokenizer),
        "additional_special_tokens": [START],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **roles,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", {**roles, "additional_special_tokens": [START]})


def load(folder: Path = DEMO) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=DEMO)
    arguments = parser.parse_args()
    tokenizer = train(arguments.seed)
    save(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
