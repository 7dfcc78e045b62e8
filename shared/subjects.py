"""The grammar of subjects: the only file that spells one.

`{namespace}.v{major}.` starts each. A stateful service is addressed by id and instance id, so that nothing sent to a
process that has ended is ever received by its successor; the stateless tokenizers of a model are one queue group.
`<model>` is `model_token` of the served name.

| subject                      | from                 | carries                                                      |
|------------------------------|----------------------|--------------------------------------------------------------|
| `tok.<model>.req`            | gateway              | TokenizeRequest, DetokenizeRequest (request)                 |
| `tok.<id>.<instance_id>.req` | gateway              | the same, to one replica: retries                            |
| `eng.<id>.<instance_id>.ctl` | gateway, detokenizer | SubmitBatch, Retarget (request); Cancel, Done, Resend        |
|                              | gateway              | ProgressQuery, OwnershipReply                                |
| `det.<id>.<instance_id>.ctl` | gateway              | OpenBatch, OpenStream (request); CloseStream, OwnershipReply |
| `det.<id>.<instance_id>.tok` | engine               | TokenEvents                                                  |
| `gw.<id>.<instance_id>.txt`  | detokenizer          | TextEvents                                                   |
| `gw.<id>.<instance_id>.ctl`  | engine, detokenizer  | ProgressReply, OwnershipQuery                                |
| `hb.<service>.<id>`          | every service        | Heartbeat                                                    |
"""

import hashlib
import re
import secrets
from dataclasses import dataclass

from shared.limits import MEMBER_ID_CHARS_MAX, MODEL_TOKEN_CHARS_MAX, PROTOCOL_VERSION

TOKENIZER_QUEUE = "tokenizers"
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{MEMBER_ID_CHARS_MAX}}}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_HASH_CHARS = 8
_HASHED = re.compile(rf"-[0-9a-f]{{{_HASH_CHARS}}}$")


def new_instance_id() -> str:
    """A fresh incarnation: 8 hexadecimal digits, drawn at process start."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builds the subjects of one deployment; several share a server under different namespaces."""

    namespace: str = "antiphon"

    def __post_init__(self) -> None:
        assert _TOKEN.fullmatch(self.namespace), self.namespace

    def tokenize(self, model: str) -> str:
        """Where the tokenizers of a model listen. `model`: the served name as it is."""
        return self._join("tok", model_token(model), "req")

    def tokenizer_direct(self, tokenizer_id: str, instance_id: str) -> str:
        """One incarnation of a tokenizer: a retry avoids a frozen member of the queue group."""
        return self._join("tok", tokenizer_id, instance_id, "req")

    def engine_control(self, engine_id: str, instance_id: str) -> str:
        """Commands to one incarnation of an engine."""
        return self._join("eng", engine_id, instance_id, "ctl")

    def detokenizer_control(self, detokenizer_id: str, instance_id: str) -> str:
        """Commands to one incarnation of a detokenizer."""
        return self._join("det", detokenizer_id, instance_id, "ctl")

    def detokenizer_tokens(self, detokenizer_id: str, instance_id: str) -> str:
        """Token events to one incarnation of a detokenizer."""
        return self._join("det", detokenizer_id, instance_id, "tok")

    def gateway_text(self, gateway_id: str, instance_id: str) -> str:
        """Text events to one incarnation of a gateway."""
        return self._join("gw", gateway_id, instance_id, "txt")

    def gateway_control(self, gateway_id: str, instance_id: str) -> str:
        """Questions and answers about sequences to one incarnation of a gateway."""
        return self._join("gw", gateway_id, instance_id, "ctl")

    def heartbeat(self, service: str, member_id: str) -> str:
        """One member's heartbeat."""
        return self._join("hb", service, member_id)

    def heartbeats(self, service: str = "*") -> str:
        """All heartbeats of one service, or of all."""
        return self._join("hb", service, "*")

    def inbox(self, member_id: str) -> str:
        """Prefix of the reply subjects of one member."""
        return self._join("inbox", member_id)

    def everything(self) -> str:
        """Every subject of the deployment."""
        return self._join(">")

    def _join(self, *tokens: str) -> str:
        return ".".join((self.namespace, f"v{PROTOCOL_VERSION}", *tokens))


def model_token(name: str) -> str:
    """A served model name as one token of a subject, at most `MODEL_TOKEN_CHARS_MAX` characters; see `safe_token`."""
    return safe_token(name, MODEL_TOKEN_CHARS_MAX)


def safe_token(text: str, chars_max: int) -> str:
    """Any text as one token of a subject: letters, digits, '-' and '_', 1 to `chars_max` characters.

    Safe text within the bound stays as it is. Other text has its unsafe characters replaced by '-', is cut, and gets a
    hash of the whole text at its end. Safe text that ends like such a hash gets one too: two texts share a token only
    if they share the hash.
    """
    if text and len(text) <= chars_max and not _UNSAFE.search(text) and not _HASHED.search(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]
    readable = _UNSAFE.sub("-", text).strip("-")[: chars_max - _HASH_CHARS - 1]
    return f"{readable}-{digest}"


def check_id(member_id: str) -> str:
    """Returns the id; raises ValueError when it cannot stand in a subject."""
    if not _TOKEN.fullmatch(member_id):
        raise ValueError(f"a service id is 1 to {MEMBER_ID_CHARS_MAX} letters, digits, '-' or '_', not {member_id!r}")
    return member_id
