"""Messages about the versions of models: orders to the launcher that runs them, and their news. See the package."""

from typing import Literal

from shared.messages.base import Message


class ChangeModel(Message, frozen=True, array_like=True, tag=True):
    """Asks the launcher of a model to change its versions. Answered by `ModelsChanged` when it has accepted the order.

    `set`: starts `directory` as a new version, which gets the requests when it is ready. `rollback`: gives the requests
    to the former version again. `shadow`: starts `directory` as a version that computes copies of a `share` of the
    requests. `unshadow`: ends that version.
    """

    action: Literal["set", "rollback", "shadow", "unshadow"]
    model: str
    directory: str = ""
    share: float = 0.0


class ModelsChanged(Message, frozen=True, array_like=True, tag=True):
    """The versions of models as they are now. To all gateways.

    Has `shared.deployment.model_versions.ModelStates`, encoded.
    """

    states: bytes
