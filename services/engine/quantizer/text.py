"""The tokens for calibration, and those for the measurement of perplexity.

Both texts are part of the package; `infra/calibration_text.py` creates them. `-token` replaces the calibration text.
Called by `run`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.text.codec import load_codec

LENGTH = 256
"""Tokens of a sequence."""
CALIBRATION_SEQUENCES, HELD_OUT_SEQUENCES = 64, 16
_TEXTS = Path(__file__).parent
_CALIBRATION, _HELD_OUT = _TEXTS / "calibration.txt", _TEXTS / "held_out.txt"
_SEPARATORS = re.compile(r"[,\s]+")


def calibration_batches(model_dir: Path, description: DecoderDescription) -> list[Tensor]:
    """Returns token ids [sequences, length] of the calibration text. Raises SettingsError without a tokenizer."""
    return _batches(model_dir, description, _CALIBRATION, CALIBRATION_SEQUENCES)


def held_out_batches(model_dir: Path, description: DecoderDescription) -> list[Tensor]:
    """Returns token ids of text that is not used for calibration. Raises SettingsError without a usable tokenizer."""
    return _batches(model_dir, description, _HELD_OUT, HELD_OUT_SEQUENCES)


def batches_of_file(path: Path, description: DecoderDescription) -> list[Tensor]:
    """Returns the samples of a file of token ids, one sample in a line, ids separated by commas or blanks.

    Samples of equal length are one batch; samples longer than the model's context are divided. Raises SettingsError
    for a file that cannot be read, and names the line if it has an invalid token id.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--tokenids_path: {path} cannot be read: {error}") from error
    samples: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        words = [word for word in _SEPARATORS.split(line) if word]
        for word in words:
            if not word.isdecimal() or int(word) >= description.vocab_size:
                raise SettingsError(
                    f"--tokenids_path: line {number} of {path} has {word!r}; token ids of this model are "
                    f"0 to {description.vocab_size - 1}, separated by commas or blanks"
                )
        ids, longest = list(map(int, words)), description.usual_positions
        samples += [ids[first : first + longest] for first in range(0, len(ids), longest)]
    if not samples:
        raise SettingsError(f"--tokenids_path: {path} has no token ids; write one sample in each line")
    lengths = sorted({len(sample) for sample in samples})
    return [torch.tensor([sample for sample in samples if len(sample) == length]) for length in lengths]


def _batches(model_dir: Path, description: DecoderDescription, text: Path, count: int) -> list[Tensor]:
    try:
        codec = load_codec(model_dir)
        # If the tokenizer begins every text with a special token, each sequence begins with it too, because models use
        # it as an attention sink.
        start = codec.encode([""], add_special_tokens=True)[0][:1]
        ids = codec.encode([text.read_text(encoding="utf-8")], add_special_tokens=False)[0]
    except ServiceError as error:
        raise SettingsError(f"-i: {model_dir} has no tokenizer that can be used: {error.message}") from error
    if max(ids) >= description.vocab_size:
        raise SettingsError(
            f"-i: the tokenizer of {model_dir} has tokens from {description.vocab_size} on, which the model "
            "does not have"
        )
    length = min(LENGTH, description.usual_positions)
    return [_sequences(ids, start, length, count)]


def _sequences(ids: Sequence[int], start: list[int], length: int, count: int) -> Tensor:
    """Returns up to `count` sequences [n, length], spread over a text."""
    inner = length - len(start)
    whole = max(1, len(ids) // inner)
    chosen = [whole * place // count for place in range(count)] if whole > count else list(range(whole))
    return torch.tensor([[*start, *ids[index * inner : (index + 1) * inner]] for index in chosen])
