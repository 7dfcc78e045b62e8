"""Images of a chat's body before they are read: what has no effect is told. Called by the conversion of chats.

Agents send what their tools have read, also to models that see nothing, and send it again in each later request. A
refusal would end the whole conversation, so such a model reads that there is an image. A user's image is refused.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from antiphon.services.gateway.edge.access.call import ignore
from antiphon.shared.request.conversation import ContentPart, NamedPart, Turn
from antiphon.shared.request.images import ImageInput, ImageUrl, TakeImage, taken_into

UNSEEN = "(Here is an image, which this model cannot see.)"
_OWN_SIZE = (None, "auto")


def take_into(images: list[ImageInput]) -> TakeImage:
    """Returns a `TakeImage` that collects the images of a conversation in a list, in order, and tells of `detail`."""
    take = taken_into(images)

    def take_and_tell(given: ImageUrl | str | None, param: str) -> None:
        if isinstance(given, ImageUrl):
            tell_detail(given.detail, f"{param}.detail")
        take(given, param)

    return take_and_tell


def tell_detail(detail: str | None, name: str) -> None:
    """Tells that a `detail` has no effect: the size of images is a setting of the server."""
    if detail not in _OWN_SIZE:
        ignore(name)


def results_in_words(turns: Sequence[Turn] | None) -> list[Turn] | None:
    """Returns the messages of a conversation with a sentence in the place of each image that a tool has returned."""
    if turns is None:
        return None
    return [_in_words(turn, f"messages[{number}].content") for number, turn in enumerate(turns)]


def _in_words(turn: Turn, path: str) -> Turn:
    if turn.role != "tool" or not isinstance(turn.content, list):
        return turn
    return replace(turn, content=[_part_in_words(part, f"{path}[{place}]") for place, part in enumerate(turn.content)])


def _part_in_words(part: int | ContentPart, path: str) -> int | ContentPart:
    if not isinstance(part, ContentPart) or part.type != "image_url":
        return part
    ignore(part.param if isinstance(part, NamedPart) else f"{path}.image_url")
    return ContentPart(type="text", text=UNSEEN)
