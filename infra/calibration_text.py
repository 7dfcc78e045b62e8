"""Generates the texts for calibration and measurement by `antiphon quantize`: stories, small facts and docs.

All text is the project's own: generated training text of the demo model, and the prose of docs/. Run it
as `python -m infra.calibration_text`. The result is deterministic for the same docs. It is committed, so that changes
of the docs do not change quantized models.
"""

import re
from pathlib import Path
from random import Random

from infra.demo_model.texts.corpus import plain_text

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "services" / "engine" / "quantizer"
SIZES = {"calibration": 280_000, "held_out": 60_000}
"""Characters of each text."""
_GENERATED = 0.6
"""Share of generated text."""
_LEAST_PARAGRAPH = 120
_BETWEEN = "\n\n"


def paragraphs() -> list[str]:
    """Returns the paragraphs of the docs without tables, code and headings, ordered by file name."""
    found: list[str] = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for part in text.split("\n\n"):
            line = " ".join(part.split())
            if len(line) >= _LEAST_PARAGRAPH and line[0].isalpha() and "|" not in line:
                found.append(line)
    return found


def text(name: str, documents: list[str]) -> str:
    """Returns a text in which generated documents and paragraphs alternate."""
    size, rng = SIZES[name], Random(f"quantization/{name}")
    parts: list[str] = []
    generated, written, left = 0, 0, iter(documents)
    while generated + written < size:
        paragraph = None if generated < _GENERATED * (generated + written) else next(left, None)
        if paragraph is None:
            parts.append(plain_text(rng))
            generated += len(parts[-1])
        else:
            parts.append(paragraph)
            written += len(paragraph)
    return _BETWEEN.join(parts) + "\n"


def main() -> None:
    """Writes the texts. Every sixth paragraph goes into the held-out text."""
    documents = paragraphs()
    shares = {
        "calibration": [part for index, part in enumerate(documents) if index % 6],
        "held_out": documents[::6],
    }
    for name, share in shares.items():
        path = TARGET / f"{name}.txt"
        path.write_text(text(name, share), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
