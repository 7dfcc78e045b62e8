"""What schemathesis loads (`SCHEMATHESIS_HOOKS`): a check of error bodies, which also counts the answers.

Runs in the environment of schemathesis, without the product's packages.
"""

import atexit
import collections
import json
import os
import re
from pathlib import Path
from typing import Any

import schemathesis

_COUNTS = collections.Counter[str]()
_OLLAMA, _ANTHROPIC = re.compile(r"/api/"), re.compile(r"/v1/messages")
"""The paths whose errors have another form."""


@schemathesis.check
def error_body(_context: Any, response: Any, case: Any) -> None:
    """Fails for an error whose body is not that of the path's API, or that has no message."""
    _COUNTS[str(response.status_code)] += 1
    if response.status_code < 400 or case.method.upper() == "HEAD":
        return
    body = json.loads(response.content)
    error = body["error"]
    if _OLLAMA.match(case.path):
        assert isinstance(error, str), body
        assert error, body
        return
    assert isinstance(error["message"], str), body
    assert error["message"], body
    assert isinstance(error["type"], str), body
    if _ANTHROPIC.match(case.path):
        assert body["type"] == "error", body
        return
    assert error["param"] is None or isinstance(error["param"], str), body
    assert isinstance(error["code"], str), body
    assert error["code"], body


@atexit.register
def _write() -> None:
    path = os.environ.get("ANTIPHON_FUZZ_COUNTS")
    if path and _COUNTS:
        Path(path).write_text(json.dumps(dict(sorted(_COUNTS.items()))), encoding="utf-8")
