"""Separates a reasoning model's thoughts from its answer: text between `<think>` and `</think>` at the start. Pure."""

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, prompt: str, *, ended: bool) -> tuple[str | None, str]:
    """(thoughts, answer) of an output so far; thoughts are None for an output that does not begin with any.

    The prompt of some models ends with the opening tag, so that the output begins within the thoughts. While the output
    has not `ended`, characters that may turn out to be part of a tag are in neither.
    """
    if prompt.rstrip().endswith(OPEN):
        thoughts = text
    else:
        start = text.lstrip()
        if not start.startswith(OPEN):
            may_begin = not ended and OPEN.startswith(start)
            return None, "" if may_begin else text
        thoughts = start[len(OPEN) :]
    thoughts, closed, answer = thoughts.partition(CLOSE)
    if not closed and not ended:
        thoughts = _without_part_of(CLOSE, thoughts)
    return thoughts.strip("\n"), answer.lstrip("\n")


def _without_part_of(tag: str, text: str) -> str:
    """The text without an end that begins the tag."""
    held = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return text[: len(text) - held]
