"""The permissions on the bus: the subjects that each kind of service may publish and subscribe to.

The configurations of all NATS servers are generated from this module: by `antiphon.launch.nats_server` for `antiphon
serve`, by `infra.checks.bus_users` for containers and Kubernetes. The tests use it too. Subjects that are not listed
are denied.

`member` is the id of one process, which then has its own user; with `*` all replicas of a service share a user, and the
bus cannot distinguish them. NATS matches whole tokens of a subject, so the names of JetStream streams are listed one by
one.

Two features of NATS would void the table, so nobody may use them except as said here:

- Who creates or updates a stream decides which subjects it captures and republishes to. Only `setup` may.
- `allow_responses` lets a client publish to the reply subject of any message that it receives, and a message to oneself
  may have any. Instead every service may publish to the subjects of all replies, of which nobody can guess those that
  are awaited (`antiphon.shared.bus.nats_client`).
"""

import base64
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from antiphon.shared.subjects import LAUNCHER_QUEUE, TOKENIZER_QUEUE, VISION_QUEUE, Subjects, bucket_name

Role = Literal["gateway", "tokenizer", "engine", "detokenizer", "vision", "launcher", "observer", "setup"]
ROLES: tuple[Role, ...] = get_args(Role)
BUCKETS: dict[str, tuple[Role, ...]] = {
    "limits": ("gateway",),
    "adapters": ("gateway", "engine"),
    "models": ("gateway", "launcher"),
}
"""Key-value stores, and the roles that read and write them."""
LOGS = ("streams", "stream-tokens", "responses", "background", "background-events", "usage", "idempotency")
"""Logs on JetStream that gateways write and read: the records of streams, their tokens, finished responses, the
records and events of responses that run in the background, usage records, and answers that may be repeated."""
_OTHER_REPLIES = "_INBOX.>"
"""The reply subjects of NATS's own tools, which ask services for their names and statistics."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Patterns of subjects; a word after a space is a queue group."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def role(service: str) -> Role:
    """Returns the role of a service, which has the same name."""
    return next(each for each in ROLES if each == service)


def permissions(role: Role, subjects: Subjects, member: str = "*") -> Permissions:
    """Returns what a role may do in a deployment."""
    return _BY_ROLE[role](subjects, member)


def password(secret: bytes, user: str) -> str:
    """Returns the password of a user, derived from the bus's secret: all processes with the secret know it."""
    digest = hmac.digest(secret, f"bus user {user}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _gateway(subjects: Subjects, member: str) -> Permissions:
    return Permissions(
        publish=(
            subjects.any_tokenizer(),
            subjects.tokenizer_direct("*", "*"),
            subjects.engine_control("*", "*"),
            subjects.engine_adapters("*", "*"),
            subjects.engine_blocks("*", "*"),
            subjects.engine_stored("*", "*"),
            subjects.all_adapters(),
            subjects.detokenizer_control("*", "*"),
            subjects.gateway_peers("*", "*"),
            subjects.any_vision(),
            subjects.models_control(),
            subjects.usage(),
            subjects.repeatable("*"),
            subjects.stream_record("*"),
            subjects.stream_journal(member, "*"),
            subjects.response("*"),
            subjects.background_record("*"),
            subjects.background_events("*"),
            *(subject for name in LOGS for subject in _log(subjects, name)),
            *_own_publish("gateway", subjects, member),
        ),
        subscribe=(
            subjects.gateway_text(member, "*"),
            subjects.gateway_tokens(member, "*"),
            subjects.gateway_control(member, "*"),
            subjects.gateway_peers(member, "*"),
            subjects.gateway_images(member, "*"),
            subjects.gateway_blocks(member, "*"),
            subjects.blocks(),
            subjects.all_adapters(),
            subjects.models(),
            subjects.ended(),
            subjects.heartbeats(),
            subjects.steps(),
            *_own_subscribe("gateway", subjects, member),
        ),
    )


def _tokenizer(subjects: Subjects, member: str) -> Permissions:
    return Permissions(
        publish=_own_publish("tokenizer", subjects, member),
        subscribe=(
            f"{subjects.any_tokenizer()} {TOKENIZER_QUEUE}",
            subjects.tokenizer_direct(member, "*"),
            *_own_subscribe("tokenizer", subjects, member),
        ),
    )


def _engine(subjects: Subjects, member: str) -> Permissions:
    return Permissions(
        publish=(
            subjects.detokenizer_tokens("*", "*"),
            subjects.gateway_tokens("*", "*"),
            subjects.gateway_control("*", "*"),
            subjects.gateway_blocks("*", "*"),
            subjects.blocks(member),
            subjects.all_adapters(),
            subjects.any_vision(),
            subjects.vision_direct("*", "*"),
            subjects.steps(member),
            subjects.engine_kv("*", "*"),
            *_own_publish("engine", subjects, member),
        ),
        subscribe=(
            subjects.engine_control(member, "*"),
            subjects.engine_adapters(member, "*"),
            subjects.engine_kv(member, "*"),
            subjects.engine_blocks(member, "*"),
            subjects.engine_stored(member, "*"),
            subjects.all_adapters(),
            subjects.heartbeats("gateway"),
            subjects.heartbeats("engine"),
            *_own_subscribe("engine", subjects, member),
        ),
    )


def _detokenizer(subjects: Subjects, member: str) -> Permissions:
    return Permissions(
        publish=(
            subjects.gateway_text("*", "*"),
            subjects.gateway_control("*", "*"),
            subjects.engine_control("*", "*"),
            *_own_publish("detokenizer", subjects, member),
        ),
        subscribe=(
            subjects.detokenizer_control(member, "*"),
            subjects.detokenizer_tokens(member, "*"),
            subjects.heartbeats("gateway"),
            *_own_subscribe("detokenizer", subjects, member),
        ),
    )


def _vision(subjects: Subjects, member: str) -> Permissions:
    return Permissions(
        publish=(subjects.gateway_images("*", "*"), *_own_publish("vision", subjects, member)),
        subscribe=(
            f"{subjects.any_vision()} {VISION_QUEUE}",
            subjects.vision_direct(member, "*"),
            *_own_subscribe("vision", subjects, member),
        ),
    )


def _launcher(subjects: Subjects, member: str) -> Permissions:
    """Permissions of `antiphon serve` itself, which changes the versions of models and watches their processes."""
    return Permissions(
        publish=(subjects.models(), subjects.ended(), *_own_publish("launcher", subjects, member)),
        subscribe=(
            f"{subjects.models_control()} {LAUNCHER_QUEUE}",
            subjects.models(),
            subjects.heartbeats(),
            *_own_subscribe("launcher", subjects, member),
        ),
    )


def _observer(subjects: Subjects, member: str) -> Permissions:
    """Permissions of operators and their tools: read everything, and use NATS service discovery."""
    return Permissions(
        publish=("$SRV.>",),
        subscribe=(subjects.everything(), _OTHER_REPLIES),
    )


def _setup(subjects: Subjects, member: str) -> Permissions:
    """Permissions of `antiphon.shared.deployment.store_keeper`: to make the stores, not to use them."""
    streams = [f"KV_{bucket_name(subjects.namespace, name)}" for name in BUCKETS]
    streams += [bucket_name(subjects.namespace, name) for name in LOGS]
    return Permissions(
        publish=tuple(f"$JS.API.STREAM.{verb}.{stream}" for stream in streams for verb in ("CREATE", "UPDATE", "INFO")),
        subscribe=(f"{subjects.inbox('setup', member)}.>",),
    )


def _own_publish(role: Role, subjects: Subjects, member: str) -> tuple[str, ...]:
    """Subjects that every service publishes: heartbeats, replies (and its probe), and requests to its stores."""
    return (
        subjects.heartbeat(role, member),
        subjects.replies(),
        _OTHER_REPLIES,
        *(subject for name, roles in BUCKETS.items() if role in roles for subject in _bucket(subjects, name)),
    )


def _own_subscribe(role: Role, subjects: Subjects, member: str) -> tuple[str, ...]:
    """Subscriptions of every service: its inbox, service discovery, its own heartbeats (for health checks)."""
    service = f"{subjects.namespace}-{role}"
    return (
        f"{subjects.inbox(role, member)}.>",
        subjects.heartbeats(role),
        *(f"$SRV.{rest}" for rest in ("*", f"*.{service}", f"*.{service}.{member}")),
    )


def _bucket(subjects: Subjects, name: str) -> tuple[str, ...]:
    """Permissions to read and write the entries of a key-value store."""
    bucket = bucket_name(subjects.namespace, name)
    return (f"$KV.{bucket}.>", f"$JS.API.STREAM.INFO.KV_{bucket}", f"$JS.API.DIRECT.GET.KV_{bucket}.>")


def _log(subjects: Subjects, name: str) -> tuple[str, ...]:
    """Permissions to read a log. Writing depends on the subject."""
    log = bucket_name(subjects.namespace, name)
    return (f"$JS.API.STREAM.INFO.{log}", f"$JS.API.DIRECT.GET.{log}", f"$JS.API.DIRECT.GET.{log}.>")


_BY_ROLE: dict[Role, Callable[[Subjects, str], Permissions]] = {
    "gateway": _gateway,
    "tokenizer": _tokenizer,
    "engine": _engine,
    "detokenizer": _detokenizer,
    "vision": _vision,
    "launcher": _launcher,
    "observer": _observer,
    "setup": _setup,
}


def render_user(user: str, secret: str, granted: Permissions) -> str:
    """Returns a user as a line of a NATS configuration. `secret`: its password, quoted, or the name of a variable."""
    publish = ", ".join(f'"{subject}"' for subject in granted.publish)
    subscribe = ", ".join(f'"{subject}"' for subject in granted.subscribe)
    allowed = f"publish: {{ allow: [{publish}] }}, subscribe: {{ allow: [{subscribe}] }}"
    return f'{{ user: "{user}", password: {secret}, permissions: {{ {allowed} }} }}'
