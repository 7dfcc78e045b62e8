"""Writes docs/contributing/clients.md: how coding agents are set up, and what each client did at its last run.

The first part is what the tests use (`agents.agents`), the second is `results.json`. Run as
`python -m tests.clients.page`; `--check` only compares.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from infra.checks.generated import keep
from tests.clients import results
from tests.clients.agents.agents import AGENTS, Agent, Server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contributing" / "clients.md"
_SHOWN = Server("http://localhost:8000", "MODEL", "KEY", 32768)
_HEAD = """# Other people's clients

Written by `python -m tests.clients.page` from the tests' own settings and from the results of `make client-test`.

## Coding agents

These agents need a model with a context of 32,768 tokens or more. In the settings below, `MODEL` is the name under
which the server knows the model (`--served-model-name`, or what `GET /v1/models` shows), `KEY` is an API key (any text,
if the server has none), and 32768 is the context of the model (`--max-model-len`). The variables in the second line of
a box keep the agent from asking other hosts; leave them out if it may.

Their prompts are long: with the demo model's small vocabulary, the longest of a short conversation has

| agent | tokens | fields without effect, told in `X-Antiphon-Ignored` |
|---|---|---|
"""
_TESTED = """
## What is tested

`make client-test` installs the clients (agents in the versions that `tests/clients/package.json` names) and runs each
against a server on this machine. Where the system allows it (`unshare`), there is no other network, so that nothing
else can have answered.

An agent gets an empty environment, a home of its own, and a key. It is asked to read a file and to say what is in it,
for which it has to call a tool; then it continues the conversation. It must end without an error, each of its requests
must be answered with 200 at the first try and to its end, and its answer must be right. Then the same again, and in the
middle of each of the two turns an engine is killed (`kill -9`): another one continues, and the agent must not notice.
"Moved" counts the sequences that were continued so. The model is the demo model; "a script" means that the server is
complete, but its engines say what a script tells them, because the demo model's context is shorter than the prompts.

The requests of the agents, with other prose, are sent again in each `make test`
(`tests/integration/agent_requests`). `make client-test ARGS=--record-requests` writes them anew;
`ARGS="-k Codex --agents-model DIR"` runs one agent with another model, which has to call its tools.

An SDK or library makes each of its calls that a server of language models can answer, one after the other, with the
demo model, one that takes images, and one that writes its reasoning first. Each must give what its name says
(`tests/clients/sdks`, `tests/clients/frameworks`). "Answered" are calls that this server refuses on purpose, with a 4xx
error; [APIs](../reference/apis.md#what-is-not-offered-and-why) says what to use in their place. OpenAI's Python
client 3.x is part of `make test`.

## Results

"""


def render() -> str:
    """Returns the text of the page."""
    rows = results.read()
    tokens = [_size(agent, rows) for agent in AGENTS]
    return _HEAD + "".join(tokens) + "".join(map(_guide, AGENTS)) + _TESTED + results.table(rows) + "\n"


def _size(agent: Agent, rows: list[results.Row]) -> str:
    own = [row for row in rows if row.client == agent.name]
    longest = max([row.prompt_tokens for row in own], default=0)
    ignored = sorted({name for row in own for name in row.ignored})
    return f"| {agent.name} | {longest:,} | {', '.join(f'`{name}`' for name in ignored)} |\n"


def _guide(agent: Agent) -> str:
    setup = agent.setup(_SHOWN)
    lines = [f"\n### {agent.name}\n"]
    if setup.path:
        kind = setup.path.rpartition(".")[2]
        lines.append(f"`~/{setup.path}`:\n\n```{kind}\n{setup.text}```\n")
    lines.append(f"```sh\n{chr(10).join(_commands(agent))}\n```\n")
    if agent.hint:
        lines.append(f"{agent.hint}\n")
    return "\n".join(lines)


def _commands(agent: Agent) -> Iterator[str]:
    yield f"export {_assigned(agent.setup(_SHOWN).variables)}"
    if agent.quiet:
        yield f"export {_assigned(agent.quiet)}"
    yield " ".join([agent.program, *[word for word in agent.ask if word.startswith("--auth-type")]])


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def main() -> int:
    return keep(PAGE, render(), "make docs", check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
