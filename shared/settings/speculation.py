"""Reads vLLM's `--speculative-config` as settings here. Called where options of other servers are (`other_options`)."""

import json
from typing import Any, cast

_KEYS = frozenset({"method", "num_speculative_tokens"})


def speculation_settings(value: str) -> dict[str, Any]:
    """Returns the settings that ask for the same as a `--speculative-config`, a JSON object; {} if there are none.

    The method `ngram` is drafts from the request's own text; `mtp`, which vLLM also calls by the names of models
    (`deepseek_mtp`), is the layer of the checkpoint. Other fields than the number of tokens have no equal.
    """
    try:
        read = json.loads(value)
    except ValueError:
        return {}
    given = cast(dict[str, Any], read) if isinstance(read, dict) else {}
    if not given.keys() <= _KEYS:
        return {}
    method, count = given.get("method"), given.get("num_speculative_tokens")
    if method == "ngram":
        found: dict[str, Any] = {"use_lookahead": True, "use_v2_block_manager": True}
    elif isinstance(method, str) and (method == "mtp" or method.endswith("_mtp")):
        found = {"use_mtp": True}
    else:
        return {}
    return found if count is None else {**found, "num_speculative_tokens": count}
