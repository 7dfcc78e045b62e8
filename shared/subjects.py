"""The grammar of subjects: the only file that spells one.

`{namespace}.v{major}.` starts each. A stateful service is addressed by id and boot, so that nothing sent to a dead
incarnation is ever received by its successor; the stateless tokenizers are one queue group.

| subject                 | from          | carries                                      |
|-------------------------|---------------|----------------------------------------------|
| `tok.req`               | gateway       | TokenizeRequest, DetokenizeRequest (request) |
| `tok.<id>.<boot>.req`   | gateway       | the same, to one replica: retries                |
| `eng.<id>.<boot>.ctl`   | gateway, detokenizer | Submit, Retarget (request); Cancel, Done, Resend |
| `det.<id>.<boot>.ctl`   | gateway       | OpenStream (request), CloseStream            |
| `det.<id>.<boot>.tok`   | engine        | TokenEvents                                  |
| `gw.<id>.<boot>.txt`    | detokenizer   | TextEvents                                   |
| `hb.<service>.<id>`     | every service | Heartbeat                                    |
"""

import re
import secrets
from dataclasses import dataclass

from shared.limits import PROTOCOL_VERSION

TOKENIZER_QUEUE = "tokenizers"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_boot() -> str:
    """A fresh incarnation: 8 hexadecimal digits, drawn at process start."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builds the subjects of one deployment; several share a server under different namespaces."""

    namespace: str = "antiphon"

    def __post_init__(self) -> None:
        assert _TOKEN.fullmatch(self.namespace), self.namespace

    def tokenize(self) -> str:
        """Where the tokenizer pool listens."""
        return self._join("tok", "req")

    def tokenizer_direct(self, tokenizer_id: str, boot: str) -> str:
        """One incarnation of a tokenizer: a retry avoids a frozen member of the queue group."""
        return self._join("tok", tokenizer_id, boot, "req")

    def engine_control(self, engine_id: str, boot: str) -> str:
        """Commands to one incarnation of an engine."""
        return self._join("eng", engine_id, boot, "ctl")

    def detokenizer_control(self, detokenizer_id: str, boot: str) -> str:
        """Commands to one incarnation of a detokenizer."""
        return self._join("det", detokenizer_id, boot, "ctl")

    def detokenizer_tokens(self, detokenizer_id: str, boot: str) -> str:
        """Token events to one incarnation of a detokenizer."""
        return self._join("det", detokenizer_id, boot, "tok")

    def gateway_text(self, gateway_id: str, boot: str) -> str:
        """Text events to one incarnation of a gateway."""
        return self._join("gw", gateway_id, boot, "txt")

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


def check_id(member_id: str) -> str:
    """Returns the id; raises ValueError when it cannot stand in a subject."""
    if not _TOKEN.fullmatch(member_id):
        raise ValueError(f"a service id is 1 to 64 letters, digits, '-' or '_', not {member_id!r}")
    return member_id
