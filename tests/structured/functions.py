"""The functions of a published benchmark, each forced as a strict tool: which a running server takes, and what comes.

    python -m tests.structured.functions DIRECTORY --port 8000 [--tokens 200] [--choice named] [--key KEY] [--json FILE]

DIRECTORY is `berkeley-function-call-leaderboard/bfcl_eval/data` of https://github.com/ShishirPatil/gorilla. Each line
of its files has a function or a list of them. Of functions with the same name and schema the first is sent. Their types
are those of several languages; the benchmark sends them to servers as JSON Schema, and so does this script. The exit
code is as for `tests.structured.published`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.structured import published

TYPES = {
    **dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object"),
    **dict.fromkeys(("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"),
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
}
"""The benchmark's types in JSON Schema. All others, and none, are strings."""


def main() -> int:
    """Sends the functions of each file, prints what was found, and writes it to a file if asked to."""
    options = parse()
    results: dict[str, published.Counted] = {}
    for name, functions in distinct(options.directory).items():
        results[name] = of_file(functions, options)
        sys.stdout.write(published.line(name, results[name]))
        sys.stdout.flush()
    return published.finish(results, options)


def parse() -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="Functions of a benchmark as strict tools of a running server.")
    published.add_options(parser)
    parser.add_argument("--tokens", type=int, default=published.MAX_TOKENS, help="at most, of each output")
    parser.add_argument("--choice", choices=("named", "required", "auto"), default="named", help="of tools")
    return parser.parse_args()


def distinct(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the functions of each file that has some, as the benchmark writes them, without those seen before."""
    seen, found = set[str](), dict[str, list[dict[str, Any]]]()
    for path in sorted([*directory.glob("*.json"), *directory.glob("multi_turn_func_doc/*.json")]):
        for function in _functions(path):
            key = json.dumps([function["name"], function["parameters"]], sort_keys=True)
            if key not in seen:
                seen.add(key)
                found.setdefault(path.stem, []).append(function)
    return found


def _functions(path: Path) -> Iterator[dict[str, Any]]:
    decoder, text, at = json.JSONDecoder(), path.read_text(encoding="utf-8").strip(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
        found: Any = value if "parameters" in value else value.get("function", [])
        yield from [found] if isinstance(found, dict) else found


def tool(function: dict[str, Any]) -> dict[str, Any]:
    """Returns a strict tool for one of the benchmark's functions."""
    return {
        "type": "function",
        "function": {
            "name": re.sub(r"\.", "_", function["name"]),
            "description": function["description"],
            "parameters": {**schema(function["parameters"]), "type": "object"},
            "strict": True,
        },
    }


def schema(value: dict[str, Any]) -> dict[str, Any]:
    """Returns one of the benchmark's schemas as a JSON Schema."""
    found = {**value, "type": TYPES.get(value.get("type", "string"), "string")}
    if "properties" in value:
        found["properties"] = {name: schema(one) for name, one in value["properties"].items()}
    if "items" in value:
        found["items"] = schema(value["items"])
    return found


def of_file(functions: list[dict[str, Any]], options: argparse.Namespace) -> published.Counted:
    """Sends functions, a few at once."""
    counted = published.Counted(schemas=len(functions))
    tools = [tool(function) for function in functions]
    with ThreadPoolExecutor(published.AT_ONCE) as pool:
        answers = pool.map(lambda one: published.ask(fields(one, options), options), tools)
        for one, answer in zip(tools, answers, strict=True):
            published.count(counted, one["function"]["name"], one["function"]["parameters"], answer)
    return counted


def fields(one: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a request that may or must call a tool."""
    named = {"type": "function", "function": {"name": one["function"]["name"]}}
    choice = named if options.choice == "named" else options.choice
    return {"tools": [one], "tool_choice": choice, "max_tokens": options.tokens}


if __name__ == "__main__":
    sys.exit(main())
