"""Data URLs of images, as clients send them. Imports nothing else, so that the command line starts fast."""

import base64

_HEADS = {b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def data_url(file: bytes) -> str:
    """Returns a data URL with the bytes of an image file. The first bytes tell the media type."""
    kind = next((kind for head, kind in _HEADS.items() if file.startswith(head)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
