"""Finds the beginning of a marker, such as a tag, at the end of text that is still growing. Pure."""


def num_begun(text: str, *marks: str) -> int:
    """Returns the length of the longest suffix of the text that is an incomplete beginning of a marker."""
    longest = 0
    for mark in marks:
        start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while start >= 0 and not mark.startswith(text[start:]):
            start = text.find(mark[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
