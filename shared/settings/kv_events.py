"""Reads vLLM's `--kv-events-config`. Called by `shared/config.py`, the launcher and the engine."""

import importlib.util
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

_PORT = re.compile(r":(\d+)$")
_COUNTS = ("buffer_steps", "hwm", "max_queue_size")
_TEXTS = ("endpoint", "topic")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The fields of vLLM's option. `buffer_steps` counts batches, `hwm` messages, `max_queue_size` events."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """zmq or null; None: zmq if events are enabled."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def kv_events_of(text: str) -> KvEventsConfig | None:
    """Returns the value of `--kv-events-config`, with nothing enabled for an empty text; None if it is wrong."""
    # Not with msgspec: the launcher reads settings before it imports any library.
    try:
        read = json.loads(text or "{}")
        found = KvEventsConfig(**cast(dict[str, Any], read)) if isinstance(read, dict) else None
    except (ValueError, TypeError):
        return None
    return found if found is not None and _is_right(asdict(found)) else None


def _is_right(values: dict[str, Any]) -> bool:
    counts = [values[name] for name in _COUNTS]
    return (
        type(values["enable_kv_cache_events"]) is bool
        and values["publisher"] in (None, "zmq", "null")
        and all(type(values[name]) is str for name in _TEXTS)
        and isinstance(values["replay_endpoint"], str | None)
        and all(type(count) is int and count > 0 for count in counts)
    )


def of_replica(text: str, number: int) -> str:
    """Returns the option for one of several engines of a machine, which cannot share an endpoint.

    As in vLLM, ports are higher by `number`, and other endpoints end with it.
    """
    config = kv_events_of(text)
    if config is None or not number:
        return text

    def moved(endpoint: str | None) -> str | None:
        if not endpoint or not endpoint.startswith("tcp:"):
            return f"{endpoint}_dp{number}" if endpoint else endpoint
        return _PORT.sub(lambda found: f":{int(found[1]) + number}", endpoint)

    own = replace(config, endpoint=moved(config.endpoint) or "", replay_endpoint=moved(config.replay_endpoint))
    return json.dumps(asdict(own))


def has_zmq() -> bool:
    """Whether pyzmq is installed."""
    return importlib.util.find_spec("zmq") is not None
