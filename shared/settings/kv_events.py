"""Reads vLLM's `--kv-events-config`. Called by `shared/config.py`, the launcher and the engine."""

import importlib.util
import re
from typing import Literal

import msgspec

_PORT = re.compile(r":(\d+)$")


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's option. Those with the word `max` or `steps` count batches or events."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: zmq if events are enabled."""
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
    try:
        found = msgspec.json.decode(text or "{}", type=KvEventsConfig)
    except msgspec.DecodeError:
        return None
    return found if min(found.buffer_steps, found.hwm, found.max_queue_size) > 0 else None


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

    own = msgspec.structs.replace(
        config, endpoint=moved(config.endpoint) or "", replay_endpoint=moved(config.replay_endpoint)
    )
    return msgspec.json.encode(own).decode()


def has_zmq() -> bool:
    """Whether pyzmq is installed."""
    return importlib.util.find_spec("zmq") is not None
