"""A scripted model that calls tools, for the tests of calls in each API."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.scripted import scripted_system, write_scripted_model

TEMPLATE = """
{%- if tools %}<|system|>Tools: {{ tools | tojson }} Call them with <tool_call>{"name": …}</tool_call>.{% endif %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if reasoning_effort %}({{ reasoning_effort }}){% endif %}{% if thinking %}<think>
{% endif %}{% endif %}"""
SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>", "<other>")
ROME = '{"city": "Rome", "note": "{\\"é\\": []}"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
TEXT_AND_CALLS = f"Let me see. <other>\n{CALL}\n{CALL}"


@dataclass
class Script:
    """What the model says, and the prompts that it was given.

    `next`: what it says first, one text a prompt.
    """

    says: str = ""
    next: list[str] = field(default_factory=list[str])
    prompts: list[str] = field(default_factory=list[str])

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.next.pop(0) if self.next else self.says


@contextlib.asynccontextmanager
async def calling_system(directory: Path, **settings: Any) -> AsyncIterator[tuple[int, Script]]:
    """Runs the system with a scripted model that may call tools; gives its port and the script."""
    script = Script()
    tokenizer = write_scripted_model(directory, TEMPLATE, SPECIAL)
    async with scripted_system(directory, tokenizer, script, **settings) as port:
        yield port, script
