"""Random bodies and forms, from a seed: no answer may be a failure of the server."""

import json
import random
from typing import Any

from tests.attack.attack import ANY, Attack
from tests.attack.judging import FIGURES_ONLY, Told
from tests.attack.place import BOUNDARY, Place, form

CHAT: dict[str, Any] = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/generate": {"prompt": "x", "max_tokens": 2},
    "/api/chat": {"stream": False, "messages": CHAT["messages"], "options": {"num_predict": 2}},
    "/api/generate": {"stream": False, "prompt": "x", "options": {"num_predict": 2}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "x"},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/replay": {"record": {"format": "antiphon-request", "version": 1}},
}
FIELDS = (
    "n", "best_of", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs",
    "stop_token_ids", "logit_bias", "prompt_logprobs", "echo", "suffix", "user", "priority", "cache_salt", "timeout",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools",
    "tool_choice", "chat_template_kwargs", "documents", "stream", "stream_options", "bad_words", "allowed_token_ids",
    "use_beam_search", "length_penalty", "truncate_prompt_tokens", "metadata", "store", "previous_response_id", "input",
    "instructions", "reasoning", "text", "include", "prompt", "messages", "model", "system", "options", "format", "raw",
    "images", "record", "tokens", "dimensions", "encoding_format", "background", "endpoint", "input_file_id",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    2**31, 2**63, 2**64, 2**70, -(2**63) - 1, 0, -1, 1e308, 0.5, True, None, [], {}, "1", "\ud800", "a\x00b",
    "x" * 10_000, [[]] * 100, {"a": {"b": {}}}, [None], [{"role": "user", "content": [{"type": "text"}]}],
    {"type": "json_schema"},
)  # fmt: skip
RAW = (
    b"", b"null", b"[]", b'"x"', b'{"temperature": NaN}', b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b"[" * 200_000, b'{"model":"\xff\xfe"}', b"\xef\xbb\xbf{}", b'{"model":"\\ud800"}',
    b'{"max_tokens": 1' + b"0" * 400 + b"}", b'{"temperature": 1e999}', b'{"model":"a","model":"b"}', b"{} {}",
    b"{/*x*/}", b'{"x":[' + b"[]," * 200_000 + b"[]]}",
)  # fmt: skip
DISPOSITIONS = ('name="file"', "name*=utf-8''file", "filename*0*=utf-8''a; filename*1*=b", "filename*=", 'filename="')
CHARSETS = ("utf-8", "utf-7", "idna", "undefined", "punycode", "unicode_escape", "latin-1", "a%00b", "9" * 300, "")


def bodies(place: Place, rng: random.Random) -> Told:
    """Bodies with some fields of hostile values, and a few that are no object, to every route."""
    told, until, statuses = Told(), place.until(), dict[int, int]()
    while until():
        path, base = rng.choice(list(ROUTES.items()))
        changes = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}
        data = json.dumps({"model": place.model, **base, **changes}).encode()
        sent = rng.choice(RAW) if rng.random() < 0.15 else data
        answer = place.ask("POST", path, sent, key=place.alice)  # without limits: more are looked at
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        if answer.failed and len(told.broken) < 5:
            told.broken.append(f"{answer.status} for {path} with {sent[:100]!r}")
    told.figures |= {"requests": sum(statuses.values()), "by_status": {str(s): statuses[s] for s in sorted(statuses)}}
    return told


def forms(place: Place, rng: random.Random) -> Told:
    """Forms with hostile boundaries, names and characters."""
    told, until, statuses = Told(), place.until(), dict[int, int]()
    while until():
        charset, value = rng.choice(CHARSETS), rng.choice(("x", "%ff", "+2AA-", "%5cud800", "%00", "a" * 300))
        disposition = rng.choice(
            (f"name=\"file\"; filename*={charset}''{value}", f'name="file"; {rng.choice(DISPOSITIONS)}{value}')
        )
        data = bytearray(form(b"{}\n", disposition))
        for _ in range(rng.choice((0, 0, 1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        boundary = rng.choice(
            (f"boundary={BOUNDARY}", f"boundary*={charset}''{value}", f"boundary*{charset}*=utf-8''b")
        )
        headers = {"Content-Type": f"multipart/form-data; {boundary}"}
        answer = place.ask("POST", "/v1/files", bytes(data), key=place.alice, headers=headers)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        if answer.failed and len(told.broken) < 5:
            told.broken.append(f"{answer.status} for {boundary[:40]!r} and {disposition[:60]!r}")
    told.figures |= {"requests": sum(statuses.values()), "by_status": {str(s): statuses[s] for s in sorted(statuses)}}
    return told


ATTACKS = (
    Attack("fuzz-bodies", "random fields and broken JSON to every route", ANY, bodies, "no 5xx", seconds=20.0,
           goal=FIGURES_ONLY),
    Attack("fuzz-forms", "random forms of uploads", ANY, forms, "no 5xx", goal=FIGURES_ONLY),
)  # fmt: skip
