"""Writes docs/reference/request-fields.md: each field of each API's requests, and what the server does with it.

Read from the schemas of the bodies and from the rules of the APIs
(`antiphon.services.gateway.apis.openai.bodies.request_fields`).
Run as `python -m infra.checks.fields_page`; `--check` only compares.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from antiphon.services.gateway.apis.anthropic import schemas as anthropic
from antiphon.services.gateway.apis.native.schemas import GenerateBody
from antiphon.services.gateway.apis.ollama import options
from antiphon.services.gateway.apis.ollama import schemas as ollama
from antiphon.services.gateway.apis.openai.bodies.request_fields import OPENAI, FieldRules
from antiphon.services.gateway.apis.openai.pooling.schemas import EmbeddingBody
from antiphon.services.gateway.apis.openai.schemas import ChatBody, CompletionBody
from antiphon.services.gateway.guests.responses import schemas as responses
from antiphon.shared.request.conversation import Turn
from infra.checks.generated import keep

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "request-fields.md"
_HEAD = """# Fields of requests

Written by `python -m infra.checks.fields_page` from the one table of fields
([ADR 18](../adr/0018-hints-are-heard.md)).

- **acts**: the server does what the field says.
- **mapped**: another server's name; it is read as the field that is named.
- **hint**: accepted. The answer is as good without it. The response header `X-Antiphon-Ignored`, the request's timeline
  and the log name it.
- **refused**: 400 `unsupported_parameter`, because the answer would be wrong in a way that the client cannot see.
  Values that ask for nothing (in brackets) are accepted.

Every other field is treated as a hint, or refused with `--unknown-parameters=refuse`. So are unknown fields of messages
and content blocks. Unknown names that begin with `guided_` or `beam_` are always refused at OpenAI's endpoints. null is
the default of every field.
"""


class Api(NamedTuple):
    """A group of fields that has a table of its own."""

    title: str
    body: type[msgspec.Struct]
    rules: FieldRules


APIS = (
    Api("POST /v1/chat/completions", ChatBody, OPENAI),
    Api("POST /v1/completions", CompletionBody, OPENAI),
    Api("A message of a chat", Turn, OPENAI.messages or FieldRules()),
    Api("POST /v1/embeddings", EmbeddingBody, OPENAI),
    Api("POST /v1/responses", responses.ResponsesBody, responses.RULES),
    Api("POST /v1/messages", anthropic.MessagesBody, anthropic.RULES),
    Api("POST /api/chat", ollama.OllamaChatBody, ollama.RULES),
    Api("POST /api/generate", ollama.OllamaGenerateBody, ollama.RULES),
    Api("POST /api/embed", ollama.OllamaEmbedBody, ollama.EMBED_RULES),
    Api("Options of /api/chat and /api/generate", options.Options, options.RULES),
    Api("POST /generate", GenerateBody, OPENAI),
)


def render() -> str:
    """Returns the text of the page."""
    tables = ["| field | what the server does |\n|---|---|\n" + "\n".join(_rows(api)) + "\n" for api in APIS]
    return _HEAD + "".join(f"\n## {api.title}\n\n{table}" for api, table in zip(APIS, tables, strict=True))


def _rows(api: Api) -> Iterator[str]:
    acting = api.body.__struct_fields__
    yield f"| {', '.join(f'`{name}`' for name in acting)} | acts |"
    rules = api.rules
    for name, target in rules.mapped.items():
        if name not in acting and (target.partition(".")[0] in acting or "-" in target):
            yield f"| `{name}` | mapped to `{target}` |"
    if hints := sorted(rules.hints.difference(acting)):
        yield f"| {', '.join(f'`{name}`' for name in hints)} | hint |"
    for name, required in rules.requirements.items():
        if name not in acting:
            nothing = ", ".join(json.dumps(value) for value in required.asks_nothing if value is not None)
            passes = f" ({nothing})" if nothing else ""
            yield f"| `{name}` | refused{passes}{'. ' + required.instead if required.instead else ''} |"
    for name, instead in rules.elsewhere.items():
        if name not in acting:
            yield f"| `{name}` | refused. {instead} |"


def main() -> int:
    """Writes the page, or with `--check` compares it. Returns the exit code."""
    return keep(PAGE, render(), "make docs", check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
