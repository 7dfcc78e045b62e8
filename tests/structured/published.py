"""Published JSON Schemas sent to a running server: which it takes, and whether what it then writes is valid.

    python -m tests.structured.published DIRECTORY --port 8000 [--each 500] [--seed 1] [--key KEY] [--json FILE]

DIRECTORY has a directory for each set of schemas, such as `data` of https://github.com/guidance-ai/jsonschemabench. Of
each set as many schemas as asked for are drawn. An output that has its end is validated with `jsonschema`; one that
was cut at its maximum of tokens is only counted. The exit code is 1 if an answer was an error of the server, if one
did not come in time, or if an output is invalid and the server had not told that a keyword has no effect.
"""

import argparse
import http.client
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema.validators

AT_ONCE = 3
TIMEOUT_S = 60.0
MAX_TOKENS = 200


@dataclass
class Counted:
    """What a set has shown. `kinds`: how often each end came; the lists name the schemas."""

    schemas: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    refusals: dict[str, str] = field(default_factory=dict[str, str])
    """What the server said, by schema."""
    invalid: list[str] = field(default_factory=list[str])
    invalid_and_told: list[str] = field(default_factory=list[str])
    """Invalid outputs of schemas of which the server had said that a keyword has no effect."""
    failed: list[str] = field(default_factory=list[str])
    """Schemas whose request ended with an error of the server, or not in time."""
    slowest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a schema. `told`: what the server said to have no effect. `status`: 0 if none came in time."""

    status: int
    body: dict[str, Any]
    told: str
    seconds: float


def main() -> int:
    """Sends the drawn schemas of each set, prints what was found, and writes it to a file if asked to."""
    options = parse()
    results: dict[str, Counted] = {}
    for directory in sorted(one for one in options.directory.iterdir() if one.is_dir()):
        results[directory.name] = of_set(directory, options)
        sys.stdout.write(line(directory.name, results[directory.name]))
        sys.stdout.flush()
    return finish(results, options)


def finish(results: dict[str, Counted], options: argparse.Namespace) -> int:
    """Writes the results to a file if asked to. Returns the exit code."""
    if options.json is not None:
        found = {name: vars(counted) for name, counted in results.items()}
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(any(counted.failed or counted.invalid for counted in results.values()))


def parse() -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="Published JSON Schemas against a running server.")
    add_options(parser)
    parser.add_argument("--each", type=int, default=500, help="schemas of each set")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what is read, where the server is, and where the results go."""
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, required=True, help="of the server, on this machine")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--model", default="antiphon-demo")
    parser.add_argument("--json", type=Path, help="file for the results")


def of_set(directory: Path, options: argparse.Namespace) -> Counted:
    """Sends the drawn schemas of a directory, a few at once."""
    paths = sorted(directory.glob("*.json"))
    drawn = random.Random(options.seed).sample(paths, min(options.each, len(paths)))
    counted = Counted(schemas=len(drawn))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        schemas = [json.loads(path.read_text(encoding="utf-8")) for path in drawn]
        for path, schema, answer in zip(
            drawn, schemas, pool.map(lambda one: ask(fields(one), options), schemas), strict=True
        ):
            count(counted, path.name, schema, answer)
    return counted


def fields(schema: Any) -> dict[str, Any]:
    """Returns the fields of a request for an object of the schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}}
    return {"response_format": wanted, "max_tokens": MAX_TOKENS}


def ask(fields: dict[str, Any], options: argparse.Namespace) -> Answer:
    """Asks for an example, with further fields."""
    messages = [{"role": "user", "content": "Write an example."}]
    body = {"model": options.model, "messages": messages, "temperature": 0, **fields}
    headers = {"content-type": "application/json", "authorization": f"Bearer {options.key}"}
    connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=TIMEOUT_S)
    started = time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        status, told, text = response.status, response.getheader("x-antiphon-ignored", ""), response.read()
    except TimeoutError:
        status, told, text = 0, "", b"{}"
    finally:
        connection.close()
    return Answer(status, json.loads(text), told, time.monotonic() - started)


def count(counted: Counted, name: str, schema: Any, answer: Answer) -> None:
    """Adds an answer to what its set has shown."""
    counted.slowest_s = max(counted.slowest_s, round(answer.seconds, 2))
    if answer.status == 200:
        [choice] = answer.body["choices"]
        kind = "cut" if choice["finish_reason"] == "length" else judged(schema, _output(choice["message"]))
        if kind == "invalid":
            (counted.invalid_and_told if answer.told else counted.invalid).append(name)
    elif answer.status == 400:
        kind = "refused"
        counted.refusals[name] = answer.body["error"]["message"][:300]
    else:
        kind = "failed"
        counted.failed.append(f"{name}: {answer.status}")
    counted.kinds[kind] += 1


def _output(message: dict[str, Any]) -> str:
    """Returns the arguments of the call in a message, and without one its text."""
    calls = message.get("tool_calls")
    return calls[0]["function"]["arguments"] if calls else message["content"]


def judged(schema: Any, text: str) -> str:
    """Returns "valid", "invalid", or "unjudged" if `jsonschema` cannot judge by the schema."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.validators.Draft202012Validator)
    try:
        return "valid" if kind(schema).is_valid(json.loads(text)) else "invalid"
    except json.JSONDecodeError:
        return "invalid"
    except Exception:  # a schema that is none, or refers to another document: each raises its own error
        return "unjudged"


def line(name: str, counted: Counted) -> str:
    """Returns a line about what a set has shown."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counted.kinds.items()))
    told = f", {len(counted.invalid_and_told)} of the invalid ones told" if counted.invalid_and_told else ""
    return f"{name}: {counted.schemas} schemas, {kinds}{told}; slowest {counted.slowest_s} s\n"


if __name__ == "__main__":
    sys.exit(main())
