"""Messages about LoRA adapters, between gateways and engines. See also `shared/deployment/adapter_state.py`."""

from antiphon.shared.messages.base import Message


class LoadAdapter(Message, frozen=True, array_like=True, tag=True):
    """Asks an engine to read an adapter into memory. Answered by `AdapterLoaded`, or an error that names the cause.

    It does not change which adapters requests may use: the gateway does that when all engines have answered.
    """

    name: str
    path: str


class AdapterLoaded(Message, frozen=True, array_like=True, tag=True):
    """The answer to `LoadAdapter`. `version`: hash of the adapter's files."""

    name: str
    version: str
    rank: int
    num_virtual_tokens: int = 0


class AdaptersChanged(Message, frozen=True, array_like=True, tag=True):
    """Announces that the desired state of a model's adapters has changed. Gateways and engines read it again."""

    model: str
    revision: int
