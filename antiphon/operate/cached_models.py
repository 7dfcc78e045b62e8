"""`antiphon pull`, `list` and `rm`: the models on this disk that can be served by their names.

They need no server. Called by `antiphon.commands.on_disk`.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.shared.flags import SettingsError
from antiphon.shared.models import hub
from antiphon.shared.models.cached import CachedModel, cached_models, remove
from antiphon.shared.models.gguf_model.names import NoSuchFileError
from antiphon.terminal.exit_codes import CommandError, NotFoundError
from antiphon.terminal.output import show, tell

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_HEADINGS = ("NAME", "SIZE", "LAST USED", "QUANTIZATION")


def pull(options: argparse.Namespace) -> int:
    """Downloads a model and prints where it is: its directory, or the path of its GGUF file. Raises SettingsError."""
    name = options.name
    if not hub.is_name(name):
        raise SettingsError(f"NAME: {name} is no name on the hub: give org/repo, or org/repo:Q4_K_M for a GGUF file")
    if Path(name).exists():
        raise SettingsError(f"NAME: {name} is here already: serve it with `antiphon serve {name}`")
    if sys.stderr.isatty():
        tell(f"downloading {name}, unless it is here already")
    path = _snapshot(name, options)
    show({"name": name, "path": str(path)}, [str(path)], as_json=options.json)
    return 0


def _snapshot(name: str, options: argparse.Namespace) -> Path:
    from huggingface_hub import errors

    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, NoSuchFileError)
    try:
        return hub.find_snapshot(name, options.revision, "NAME", weights=True, cache=options.download_dir)
    except SettingsError as error:
        kind = NotFoundError if isinstance(error.__cause__, missing) else CommandError
        raise kind(str(error)) from error


def show_all(options: argparse.Namespace) -> int:
    """Prints the models, as a table or as JSON."""
    models = cached_models(options.download_dir)
    none = ["There are no models in the caches. Get one with `antiphon pull org/repo`, or org/repo:Q4_K_M."]
    show([_fields(model) for model in models], table(models) if models else none, as_json=options.json)
    return 0


def delete(options: argparse.Namespace) -> int:
    """Removes a model from the caches, after a question unless `--yes` is given. Raises SettingsError."""
    models = cached_models(options.download_dir)
    chosen = _chosen(models, options.name)
    told = ", ".join(f"{model.name} ({in_words(model.size)})" for model in chosen)
    if not options.yes and not _agrees(told):
        raise CommandError("nothing was removed")
    freed = sum(remove(model, options.download_dir) for model in chosen)
    files = (model.name for model in chosen if model.source == "file")
    kept = (f"Only what was made of {name} is gone; the file itself stays." for name in files)
    lines = [f"Removed {told}: {in_words(freed)} are free again.", *kept]
    show({"removed": [_fields(model) for model in chosen], "freed_bytes": freed}, lines, as_json=options.json)
    return 0


def table(models: Sequence[CachedModel]) -> Iterator[str]:
    """Yields the lines of the table."""
    rows = [_HEADINGS, *(_row(model) for model in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def in_words(count: int) -> str:
    """Returns a number of bytes in a readable unit."""
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, "bytes"))
    return f"{count / size:.1f} {unit}" if size > 1 else f"{count} bytes"


def _row(model: CachedModel) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
    return model.name, in_words(model.size), used, model.quantization


def _fields(model: CachedModel) -> dict[str, object]:
    used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.last_used))
    return {
        "name": model.name,
        "source": model.source,
        "size_bytes": model.size,
        "last_used": used,
        "quantization": model.quantization,
    }


def _chosen(models: Sequence[CachedModel], name: str) -> list[CachedModel]:
    """Returns the models that a name means: one, or all of a repository that is named without a tag."""
    if hub.is_name(name):
        repo, tag = hub.split_name(name)
        wanted = f"{repo}:{tag}".lower() if tag else ""
        found = [model for model in models if (model.name.lower() == wanted if tag else model.repo == repo)]
    else:
        found = []
    found = found or [model for model in models if model.source == "file" and model.name == str(Path(name).resolve())]
    if not found:
        raise NotFoundError(f"NAME: {name} is not in the caches; `antiphon list` shows what is")
    return found


def _agrees(told: str) -> bool:
    if not sys.stdin.isatty():
        raise SettingsError("rm asks before it removes anything, and this is no terminal: add --yes")
    try:
        print(f"Remove {told}? [y/N] ", end="", file=sys.stderr, flush=True)
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False
