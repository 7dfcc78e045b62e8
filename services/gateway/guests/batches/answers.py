"""Reads back the answers that an earlier run of a batch has written. Blocks, so it is called in threads."""

from collections.abc import Iterator
from pathlib import Path

from antiphon.shared.files.batch_lines import answer_lines, read_answer


def keep_whole_answers(path: Path, ids: set[int]) -> Iterator[None]:
    """Adds the hash of the custom id of each answer in a file to `ids`, one line in each step.

    Removes lines from the file that are no answers, or repeated ones. The earlier run may have ended in the middle of a
    line, and so may this function.
    """
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return
    end = 0
    with source, path.open("r+b") as target:
        for line in answer_lines(source):
            answer = read_answer(line.data)
            if answer is not None and hash(answer.custom_id) not in ids:
                ids.add(hash(answer.custom_id))
                if end < line.start:
                    target.seek(end)
                    target.write(line.data)
                end += len(line.data)
            yield
        target.truncate(end)
