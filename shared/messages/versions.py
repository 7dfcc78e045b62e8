"""Messages about the versions of models: orders to the launcher, and its announcements. See the package."""

from typing import Literal

from antiphon.shared.messages.base import Message


class ChangeModel(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Asks the launcher of a model to change its versions. Answered by `ModelsChanged` when it has accepted the order.

    `set`: starts `directory` as a new version, which gets all new requests when it is ready. `rollback`: makes the
    former version active again. `shadow`: starts `directory` as a shadow version, which computes copies of a `share` of
    the requests. `unshadow`: stops the shadow version. `load`: serves `directory` under a name that no model has, with
    `settings`: a JSON object as in a file of models. `unload`: ends all versions of a model.
    """

    action: Literal["set", "rollback", "shadow", "unshadow", "load", "unload"]
    model: str
    directory: str = ""
    share: float = 0.0
    settings: bytes = b""


class ModelsChanged(Message, frozen=True, array_like=True, tag=True):
    """The current versions of models. Sent to all gateways.

    `states`: an encoded `antiphon.shared.deployment.model_versions.ModelStates`.
    """

    states: bytes
