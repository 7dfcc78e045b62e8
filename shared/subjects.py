"""Builds all NATS subjects; no other file spells a subject.

Each subject starts with `{namespace}.v{major}.`. A stateful service is addressed by id and instance id, so a message to
a process that has ended never reaches its successor. The stateless tokenizers of a model are one queue group. `<model>`
is `model_token` of the model's served name.

| subject                       | from                 | carries                                                      |
|-------------------------------|----------------------|--------------------------------------------------------------|
| `tok.<model>.req`             | gateway              | TokenizeRequest, DetokenizeRequest (request)                 |
| `tok.<id>.<instance_id>.req`  | gateway              | the same, to one replica, for retries                        |
| `vis.<model>.req`             | gateway, engine      | EncodeImage (request)                                        |
| `vis.<id>.<instance_id>.req`  | engine               | ReadEmbeddings (request), to the replica that has them       |
| `gw.<id>.<instance_id>.img`   | vision               | ReadImage (request)                                          |
| `eng.<id>.<instance_id>.ctl`  | gateway, detokenizer | SubmitBatch, Retarget (request); Cancel, Done, Resend        |
|                               | gateway              | ProgressQuery, OwnershipReply, SelfTest                      |
|                               | gateway              | Withdraw, Sleep, Wake (request)                              |
| `eng.<id>.<instance_id>.lora` | gateway              | LoadAdapter (request)                                        |
| `eng.<id>.<instance_id>.kv`   | engine               | KvRoomQuery (request)                                        |
| `eng.<id>.<instance_id>.blk`  | gateway              | FollowBlocks                                                 |
| `blk.<id>`                    | engine               | BlockEvents, to all gateways that follow the engine          |
| `eng.<id>.<instance_id>.sto`  | gateway              | FindBlocks, ReadBlock, WriteBlock (request)                  |
| `lora.<model>`                | gateway, engine      | AdaptersChanged                                              |
| `det.<id>.<instance_id>.ctl`  | gateway              | OpenBatch, OpenStream (request); CloseStream, OwnershipReply |
| `det.<id>.<instance_id>.tok`  | engine               | TokenEvents                                                  |
| `gw.<id>.<instance_id>.txt`   | detokenizer          | TextEvents                                                   |
| `gw.<id>.<instance_id>.tok`   | engine               | TokenEvents of pooling sequences and of copies: without text |
| `gw.<id>.<instance_id>.ctl`   | engine, detokenizer  | ProgressReply, OwnershipQuery, SelfTestReply                 |
| `gw.<id>.<instance_id>.blk`   | engine               | BlockSnapshot; BlockEvents that the gateway missed           |
| `gw.<id>.<instance_id>.peer`  | gateway              | StreamTaken; RecordListQuery, RecordQuery (request)          |
| `models`                      | launcher             | ModelsChanged                                                |
| `models.ctl`                  | gateway              | ChangeModel (request)                                        |
| `ended`                       | launcher             | MemberEnded                                                  |
| `hb.<service>.<id>`           | every service        | Heartbeat                                                    |
| `idem.<digest of a key>`       | gateway              | a request that may be repeated, its answer; kept by the bus  |
| `usage.rec.<request id>`      | gateway              | UsageRecord, kept by the bus                                 |
| `usage.open.<request id>`     | gateway              | a request that has no usage record yet, kept by the bus      |
| `usage.sink.<name>`           | gateway              | which records a sink has, kept by the bus                    |
| `step.<id>`                   | engine               | StepEvents                                                   |
| `str.rec.<request id>`        | gateway              | the record of a stream, kept by the bus                      |
| `res.<response id>`           | gateway              | a finished response, kept by the bus                         |
| `res.image-<digest>-<n>`      | gateway              | part of an image of responses, kept by the bus               |
| `str.tok.<id>.<instance_id>`  | gateway              | the accepted tokens of its streams, kept by the bus          |
| `bg.rec.<request id>`         | gateway              | the record of a request without a client, kept by the bus    |
| `bg.ev.<request id>`          | gateway              | its events, kept by the bus                                  |
"""

import functools
import hashlib
import re
import secrets
from dataclasses import dataclass

from antiphon.shared.limits import MEMBER_ID_CHARS_MAX, MODEL_TOKEN_CHARS_MAX, PROTOCOL_VERSION

TOKENIZER_QUEUE = "tokenizers"
VISION_QUEUE = "vision"
LAUNCHER_QUEUE = "launchers"
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{MEMBER_ID_CHARS_MAX}}}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_HASH_CHARS = 8
_HASHED = re.compile(rf"-[0-9a-f]{{{_HASH_CHARS}}}$")


def new_instance_id() -> str:
    """Returns a random instance id of 8 hexadecimal digits, drawn at process start."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class _Namespace:
    """Where the subjects of a deployment begin."""

    namespace: str = "antiphon"

    def __post_init__(self) -> None:
        assert _TOKEN.fullmatch(self.namespace), self.namespace

    def _join(self, *tokens: str) -> str:
        return ".".join((self.namespace, f"v{PROTOCOL_VERSION}", *tokens))


class ServiceSubjects(_Namespace):
    """Subjects of the services that have models, and of the launchers."""

    __slots__ = ()

    def tokenize(self, model: str) -> str:
        """Requests to the tokenizers of a model, a queue group. `model` is the unchanged served name."""
        return self._join("tok", model_token(model), "req")

    def any_tokenizer(self) -> str:
        """Requests to the tokenizers of any model."""
        return self._join("tok", "*", "req")

    def tokenizer_direct(self, tokenizer_id: str, instance_id: str) -> str:
        """Requests to one tokenizer process: a retry goes here, to avoid a frozen member of the queue group."""
        return self._join("tok", tokenizer_id, instance_id, "req")

    def vision(self, model: str) -> str:
        """Requests to the image services of a model, a queue group. `model` is the unchanged served name."""
        return self._join("vis", model_token(model), "req")

    def any_vision(self) -> str:
        """Requests to the image services of all models."""
        return self._join("vis", "*", "req")

    def vision_direct(self, vision_id: str, instance_id: str) -> str:
        """Requests to one image service, which has the embeddings."""
        return self._join("vis", vision_id, instance_id, "req")

    def engine_control(self, engine_id: str, instance_id: str) -> str:
        """Commands to one engine process."""
        return self._join("eng", engine_id, instance_id, "ctl")

    def engine_adapters(self, engine_id: str, instance_id: str) -> str:
        """Requests to one engine process about adapters."""
        return self._join("eng", engine_id, instance_id, "lora")

    def engine_kv(self, engine_id: str, instance_id: str) -> str:
        """Requests to one engine process about stored KV."""
        return self._join("eng", engine_id, instance_id, "kv")

    def engine_blocks(self, engine_id: str, instance_id: str) -> str:
        """Requests of gateways to follow the prefix cache of one engine process."""
        return self._join("eng", engine_id, instance_id, "blk")

    def blocks(self, engine_id: str = "*") -> str:
        """Events of the prefix cache of one engine, or of all engines, to the gateways that follow it."""
        return self._join("blk", engine_id)

    def engine_stored(self, engine_id: str, instance_id: str) -> str:
        """Requests of gateways to one engine process about the blocks of KV on its disk."""
        return self._join("eng", engine_id, instance_id, "sto")

    def adapters(self, model: str) -> str:
        """Changes of the adapters of a model, to all its engines and all gateways."""
        return self._join("lora", model_token(model))

    def all_adapters(self) -> str:
        """Changes of the adapters of any model."""
        return self._join("lora", "*")

    def models(self) -> str:
        """Changes of the versions of models, to all gateways and launchers."""
        return self._join("models")

    def ended(self) -> str:
        """Announcements of launchers that a process has ended, to all gateways."""
        return self._join("ended")

    def models_control(self) -> str:
        """Orders to the launchers of a deployment, a queue group."""
        return self._join("models", "ctl")

    def detokenizer_control(self, detokenizer_id: str, instance_id: str) -> str:
        """Commands to one detokenizer process."""
        return self._join("det", detokenizer_id, instance_id, "ctl")

    def detokenizer_tokens(self, detokenizer_id: str, instance_id: str) -> str:
        """Token events to one detokenizer process."""
        return self._join("det", detokenizer_id, instance_id, "tok")

    def steps(self, engine_id: str = "*") -> str:
        """Step events of one engine, or of all engines."""
        return self._join("step", engine_id)


class GatewaySubjects(_Namespace):
    """Subjects of one gateway process."""

    __slots__ = ()

    def gateway_text(self, gateway_id: str, instance_id: str) -> str:
        """Text events to one gateway process."""
        return self._join("gw", gateway_id, instance_id, "txt")

    def gateway_tokens(self, gateway_id: str, instance_id: str) -> str:
        """Vectors of pooling sequences, and tokens of copies that are compared in lockstep, to one gateway process."""
        return self._join("gw", gateway_id, instance_id, "tok")

    def gateway_control(self, gateway_id: str, instance_id: str) -> str:
        """Queries and replies about sequences, to one gateway process."""
        return self._join("gw", gateway_id, instance_id, "ctl")

    def gateway_peers(self, gateway_id: str, instance_id: str) -> str:
        """Messages of other gateways, to one gateway process."""
        return self._join("gw", gateway_id, instance_id, "peer")

    def gateway_blocks(self, gateway_id: str, instance_id: str) -> str:
        """What one gateway process lacks of the content of prefix caches."""
        return self._join("gw", gateway_id, instance_id, "blk")

    def gateway_images(self, gateway_id: str, instance_id: str) -> str:
        """Requests for the files of images that one gateway process has."""
        return self._join("gw", gateway_id, instance_id, "img")


class StoredSubjects(_Namespace):
    """Subjects whose messages the bus keeps."""

    __slots__ = ()

    def stream_record(self, request_id: str) -> str:
        """The record of one stream; `*`: the records of all."""
        return self._join("str", "rec", request_id)

    def stream_journal(self, gateway_id: str, instance_id: str) -> str:
        """The journal (accepted tokens) of the streams of one gateway process; `*`: of any gateway."""
        return self._join("str", "tok", gateway_id, instance_id)

    def response(self, response_id: str) -> str:
        """A finished response of `/v1/responses`, or a part of an image of such responses; `*`: all of these."""
        return self._join("res", response_id)

    def background_record(self, request_id: str) -> str:
        """The record of one request that runs in the background; `*`: the records of all."""
        return self._join("bg", "rec", request_id)

    def background_events(self, request_id: str) -> str:
        """The events of one request that runs in the background; `*`: the events of all."""
        return self._join("bg", "ev", request_id)

    def repeatable(self, name: str) -> str:
        """One request with an idempotency key, and its answer; `*`: all of these."""
        return self._join("idem", name)

    def usage_record(self, request_id: str) -> str:
        """The usage record of one request; `*`: the records of all. No service of the deployment subscribes to them."""
        return self._join("usage", "rec", request_id)

    def usage_open(self, request_id: str) -> str:
        """One request that has no usage record yet; `*`: all of these."""
        return self._join("usage", "open", request_id)

    def usage_sink(self, name: str) -> str:
        """Which usage records a sink has."""
        return self._join("usage", "sink", name)

    def usage(self) -> str:
        """All three kinds, as a pattern."""
        return self._join("usage", "*", "*")


class Subjects(ServiceSubjects, GatewaySubjects, StoredSubjects):
    """Builds the subjects of one deployment. Several deployments can share a server under different namespaces."""

    __slots__ = ()

    def heartbeat(self, service: str, member_id: str) -> str:
        """Heartbeats of one member (a running service process)."""
        return self._join("hb", service, member_id)

    def heartbeats(self, service: str = "*") -> str:
        """Heartbeats of all members of one service, or of all services."""
        return self._join("hb", service, "*")

    def inbox(self, service: str, member_id: str) -> str:
        """Prefix of the reply subjects of one member."""
        return self._join("inbox", service, member_id)

    def replies(self) -> str:
        """The reply subjects of all members. Each has a part that only those who were asked know."""
        return self._join("inbox", "*", "*", ">")

    def everything(self) -> str:
        """Every subject of the deployment."""
        return self._join(">")


def bucket_name(namespace: str, name: str) -> str:
    """Returns the name of a key-value store of one deployment.

    For a store NATS uses the subjects `$KV.<bucket name>.>`, `$JS.API.>` and, for reading, `$JS.API.DIRECT.>`.
    """
    return f"{namespace}-v{PROTOCOL_VERSION}-{name}"


@functools.lru_cache(maxsize=256)
def model_token(name: str) -> str:
    """Returns a served model name as one token of a subject, with at most `MODEL_TOKEN_CHARS_MAX` characters.

    See `safe_token`.
    """
    return safe_token(name, MODEL_TOKEN_CHARS_MAX)


def safe_token(text: str, chars_max: int) -> str:
    """Returns any text as one token of a subject: letters, digits, '-' and '_', 1 to `chars_max` characters.

    Text that is safe and short enough is returned unchanged. In other text unsafe characters are replaced by '-', the
    result is cut, and a hash of the whole text is appended. Safe text that itself ends like such a hash also gets one,
    so two texts have the same token only if their hashes are equal.
    """
    if text and len(text) <= chars_max and not _UNSAFE.search(text) and not _HASHED.search(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]
    readable = _UNSAFE.sub("-", text).strip("-")[: chars_max - _HASH_CHARS - 1]
    return f"{readable}-{digest}"


def check_id(member_id: str) -> str:
    """Returns the id. Raises ValueError if the id cannot be a token of a subject."""
    if not _TOKEN.fullmatch(member_id):
        raise ValueError(f"a service id is 1 to {MEMBER_ID_CHARS_MAX} letters, digits, '-' or '_', not {member_id!r}")
    return member_id
