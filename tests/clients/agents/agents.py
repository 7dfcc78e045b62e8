"""The coding agents: how each is pointed at a server, is asked something, and goes on with a conversation.

What an agent would send elsewhere is switched off with its own switches, as a user without another network would do.
docs/contributing/clients.md shows these files and variables to users.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

Printed = Sequence[dict[str, Any]]
"""The lines of an agent's output, which are JSON objects."""


@dataclass(frozen=True)
class Server:
    """The server that an agent is to use."""

    url: str
    model: str
    key: str
    context: int
    """Tokens of the model's context, for agents that have to be told."""


@dataclass(frozen=True)
class Setup:
    """What points an agent at a server: a file in the home directory, and variables of the environment."""

    variables: Mapping[str, str]
    path: str = ""
    text: str = ""


@dataclass(frozen=True)
class Agent:
    """One agent. The question comes behind the words of `ask` or `go_on`."""

    name: str
    package: str
    program: str
    api: str
    setup: Callable[[Server], Setup]
    said: Callable[[Printed], str]
    """Returns what the agent answered last."""
    ask: tuple[str, ...]
    go_on: tuple[str, ...]
    quiet: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that switch off what it sends elsewhere."""
    hint: str = ""
    """What else users may want to know."""


def claude_code(server: Server) -> Setup:
    """Anthropic's API. The model for small tasks has to be named too."""
    return Setup(
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "ANTHROPIC_MODEL": server.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        }
    )


def codex(server: Server) -> Setup:
    """The Responses API. Codex does not know the model, so it is told its context."""
    text = f"""model = "{server.model}"
model_provider = "antiphon"
model_context_window = {server.context}
check_for_update_on_startup = false

[model_providers.antiphon]
name = "Antiphon"
base_url = "{server.url}/v1"
env_key = "ANTIPHON_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    return Setup({"ANTIPHON_API_KEY": server.key}, ".codex/config.toml", text)


def opencode(server: Server, npm: str = "@ai-sdk/openai-compatible") -> Setup:
    """Chat completions, or the API of another package of the Vercel AI SDK."""
    provider: dict[str, Any] = {
        "npm": npm,
        "name": "Antiphon",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "{env:ANTIPHON_API_KEY}"},
        "models": {server.model: {"limit": {"context": server.context, "output": server.context // 8}}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"antiphon/{server.model}",
        "provider": {"antiphon": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    return Setup(
        {"ANTIPHON_API_KEY": server.key}, ".config/opencode/opencode.json", json.dumps(config, indent=2) + "\n"
    )


def qwen_code(server: Server) -> Setup:
    """OpenAI's APIs, through OpenAI's client for Node."""
    settings = {
        "general": {"disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    variables = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    return Setup(variables, ".qwen/settings.json", json.dumps(settings, indent=2) + "\n")


def qwen_code_anthropic(server: Server) -> Setup:
    """Anthropic's API."""
    own = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": server.key, "ANTHROPIC_MODEL": server.model}
    return replace(qwen_code(server), variables=own)


def _result(printed: Printed) -> str:
    return next((line["result"] for line in reversed(printed) if line["type"] == "result"), "")


def _codex_said(printed: Printed) -> str:
    items = [line["item"] for line in printed if line["type"] == "item.completed"]
    return next((item["text"] for item in reversed(items) if item["type"] == "agent_message"), "")


def _opencode_said(printed: Printed) -> str:
    return next((line["part"]["text"] for line in reversed(printed) if line["type"] == "text"), "")


_CLAUDE = ("--output-format=stream-json", "--verbose", "--allowedTools=Read")
_CODEX = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_QWEN = ("--yolo", "--output-format=stream-json")
AGENTS = (
    Agent(
        name="Claude Code",
        package="@anthropic-ai/claude-code",
        program="claude",
        api="Anthropic",
        setup=claude_code,
        said=_result,
        ask=(*_CLAUDE, "-p"),
        go_on=(*_CLAUDE, "--continue", "-p"),
        quiet={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    Agent(
        name="Codex",
        package="@openai/codex",
        program="codex",
        api="OpenAI, responses",
        setup=codex,
        said=_codex_said,
        ask=("exec", *_CODEX),
        go_on=("exec", "resume", "--last", *_CODEX),
        hint="Codex warns that it has no metadata of the model; this is harmless. A server without API keys is\n"
        "found as a local one too:\n"
        "`CODEX_OSS_BASE_URL=http://localhost:8000/v1 codex --oss --local-provider ollama -m MODEL`.",
    ),
    Agent(
        name="opencode",
        package="opencode-ai",
        program="opencode",
        api="OpenAI, chat",
        setup=opencode,
        said=_opencode_said,
        ask=("run", "--format=json"),
        go_on=("run", "--format=json", "--continue"),
        quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        hint="With `@ai-sdk/openai` as `npm` it uses the Responses API, with `@ai-sdk/anthropic` Anthropic's.",
    ),
    Agent(
        name="Qwen Code",
        package="@qwen-code/qwen-code",
        program="qwen",
        api="OpenAI, chat",
        setup=qwen_code,
        said=_result,
        ask=("--auth-type=openai", *_QWEN, "-p"),
        go_on=("--auth-type=openai", *_QWEN, "--continue", "-p"),
        hint="`--auth-type=openai-responses` uses the Responses API; `--auth-type=anthropic`, with\n"
        "`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and `ANTHROPIC_MODEL` and a URL without `/v1`, Anthropic's.",
    ),
)


def _opencode_with(npm: str, api: str) -> Agent:
    return replace(_BY_PROGRAM["opencode"], name=f"opencode with {npm}", api=api, setup=partial(opencode, npm=npm))


def _qwen_with(kind: str, api: str, setup: Callable[[Server], Setup]) -> Agent:
    words = (f"--auth-type={kind}", *_QWEN)
    other = replace(_BY_PROGRAM["qwen"], name=f"Qwen Code with --auth-type={kind}", api=api, setup=setup)
    return replace(other, ask=(*words, "-p"), go_on=(*words, "--continue", "-p"))


_BY_PROGRAM = {one.program: one for one in AGENTS}
OTHER_WAYS = (
    _opencode_with("@ai-sdk/openai", "OpenAI, responses"),
    _opencode_with("@ai-sdk/anthropic", "Anthropic"),
    _qwen_with("openai-responses", "OpenAI, responses", qwen_code),
    _qwen_with("anthropic", "Anthropic", qwen_code_anthropic),
)
"""The same agents through other APIs."""
