"""The names of GGUF files in a repository: their quantization, their parts, and the choice of one by its tag. Pure.

Called by `antiphon.shared.models.hub`, which downloads the files, and by the list of the models in the caches.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PREFERRED = ("Q4_K_M", "Q8_0")
"""The quantizations that are taken if none is named, the first one first."""
_QUANTIZATION = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:IQ\d|TQ\d|Q\d)(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?)(?![A-Z0-9])"
)
_OTHER = ("mmproj", "imatrix")
"""Words in the names of files that are no language models: image encoders, and statistics for quantizing."""
_SHOWN = 12


class NoSuchFileError(ValueError):
    """No file, or more than one, fits a tag. The message continues a sentence about the repository."""


def quantization_of(name: str) -> str:
    """Returns the quantization in a file's name or its folders' names, such as `Q4_K_M`; '' if there is none."""
    found = _QUANTIZATION.findall(name.upper())
    return found[-1] if found else ""


def stem_of(name: str) -> str:
    """Returns a file's name without folders, the number of its part, and the suffix."""
    last = PurePosixPath(name).name
    part = PART.fullmatch(last)
    return part["stem"] if part else last.removesuffix(SUFFIX)


def models_among(files: Iterable[str]) -> list[list[str]]:
    """Returns the language models among the files of a repository, each as the list of its parts in their order."""
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        path = PurePosixPath(name)
        if path.suffix == SUFFIX and not any(word in path.name.lower() for word in _OTHER):
            models.setdefault(str(path.parent / stem_of(name)), []).append(name)
    return list(models.values())


def choose(files: Iterable[str], tag: str) -> list[str]:
    """Returns the parts of the model with a tag; without one Q4_K_M, else Q8_0, else the only model.

    A tag is a quantization in any case, or a file's name. Raises NoSuchFileError, which lists the tags.
    """
    models = models_among(files)
    by_tag: dict[str, list[list[str]]] = {}
    for parts in models:
        by_tag.setdefault(quantization_of(parts[0]) or stem_of(parts[0]), []).append(parts)
    if not models:
        raise NoSuchFileError("it has no GGUF file of a language model.")
    if not tag:
        wanted = next((name for name in PREFERRED if len(by_tag.get(name, ())) == 1), "")
        if not wanted and len(models) > 1:
            raise NoSuchFileError(f"it has several GGUF files; add one of these tags: {_listed(by_tag)}.")
        return by_tag[wanted][0] if wanted else models[0]
    found = _fitting(models, by_tag, tag)
    if not found:
        raise NoSuchFileError(f"it has no GGUF file with the tag {tag!r}; it has: {_listed(by_tag)}.")
    if len(found) > 1:
        names = ", ".join(PurePosixPath(parts[0]).name for parts in found[:_SHOWN])
        raise NoSuchFileError(f"several of its files have the tag {tag!r}; give the name of one as the tag: {names}.")
    return found[0]


def _fitting(models: Sequence[list[str]], by_tag: Mapping[str, list[list[str]]], tag: str) -> list[list[str]]:
    wanted = tag.upper()
    named = [parts for parts in models if tag in (PurePosixPath(parts[0]).name, stem_of(parts[0]))]
    if named:
        return named
    same = [parts for name, each in by_tag.items() if name.upper() == wanted for parts in each]
    return same or [parts for name, each in by_tag.items() if name.upper() == f"UD-{wanted}" for parts in each]


def _listed(tags: Iterable[str]) -> str:
    names = sorted(tags)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
