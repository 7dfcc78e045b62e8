"""Separates a reasoning model's thoughts, the text in `<think>…</think>` at the start, from its answer. Pure."""

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, prompt: str, *, ended: bool) -> tuple[str | None, str]:
    """Returns (thoughts, answer) of the output so far. Thoughts are None if the output does not begin with thoughts.

    The prompts of some models end with the opening tag, so that the output begins inside the thoughts. While the output
    has not `ended`, characters at its end that may belong to a tag are in neither part.
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
    """Returns the text without its end, if that end is the beginning of the tag."""
    held = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return text[: len(text) - held]
