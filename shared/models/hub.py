"""Finds models by their name on the Hugging Face hub: returns the directory in the local cache, after a download.

A name may have a tag, `org/repo:Q4_K_M`, which chooses one of the repository's GGUF files. Such a file is also taken
without a tag if the repository has no other weights (`gguf_model.names`).

The huggingface_hub library determines the cache directory, the hub and the token, from its own variables (HF_HOME,
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). The contents of a directory are not checked here. Called by
`antiphon.shared.models.model_files`. The library is imported only when a name is looked up: a model in a directory does
not need it.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from antiphon.shared.flags import SettingsError
from antiphon.shared.models.gguf_model.names import SUFFIX, NoSuchFileError, choose

_NAME = re.compile(r"(?:(?:hf\.co|huggingface\.co)/)?(?P<repo>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<tag>[\w.-]+))?")
_ANY_TAG = "latest"
"""The tag that Ollama's clients add to a name without one."""
_WEIGHTS, _TOKENIZERS = ("*.safetensors", "*.bin"), ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_SMALL = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""Patterns of all files but the weights, for any kind of tokenizer."""
_FOREIGN = ("[!1]*/*", "1[!_]*/*", "1_[!P]*/*", "consolidated*")
"""Patterns of files that are not downloaded: copies of the weights in layouts that are not supported here. The only
downloaded subdirectory is `1_Pooling`, where sentence-transformers stores the pooling mode of an embedding model.
"""
_UNAUTHORIZED = 401


def is_name(text: str) -> bool:
    """Whether `text` has the form of a name on a hub: `organisation/model` or `model`, perhaps with a tag."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def split_name(text: str) -> tuple[str, str]:
    """Returns the repository and the tag ('': none) of a name for which `is_name` holds."""
    found = _NAME.fullmatch(text)
    assert found is not None
    tag = found["tag"] or ""
    return found["repo"], "" if tag == _ANY_TAG else tag


def find_snapshot(name: str, revision: str, flag: str, *, weights: bool, cache: str = "") -> Path:
    """Returns the directory of a model's files, or its (first) GGUF file; downloads them if needed.

    Without `weights`, downloads all files but the weights; of a model in a GGUF file, the file is needed in any case.
    `revision` '' is the main branch, `cache` '' the library's default cache. Raises SettingsError with a message that
    names `flag` and says what to do.
    """
    repo, tag = split_name(name)
    try:
        return _found(repo, tag, revision, weights=weights, cache=cache)
    except NoSuchFileError as error:
        raise SettingsError(f"{flag}: {repo} cannot be served: {error}") from error
    except Exception as error:  # network, disk, hub and library errors have no common base
        reason = _reason(repo, revision, error, cache)
        raise SettingsError(f"{flag}: there is no directory {name}, and {reason}") from error


def _found(repo: str, tag: str, revision: str, *, weights: bool, cache: str) -> Path:
    directory = _download(repo, revision, _SMALL, cache)
    commit = directory.name
    if weights and not tag:
        _download(repo, commit, (*_SMALL, "*.safetensors"), cache)
        if not any(directory.glob("*.safetensors")):
            _download(repo, commit, (*_SMALL, "*.bin"), cache)
    if not tag and _is_whole(directory, weights=weights):
        return directory
    files = _files(repo, directory, needed=bool(tag))
    if not tag and not any(name.endswith(SUFFIX) for name in files):
        return directory
    if not tag and any("/" not in name and name.endswith((".safetensors", ".bin")) for name in files):
        return directory
    parts = choose(files, tag)
    _download(repo, commit, parts, cache, foreign=())
    return directory / parts[0]


def _is_whole(directory: Path, *, weights: bool) -> bool:
    """Whether a directory has what was asked for: weights, or else a configuration and a tokenizer."""
    if weights:
        return any(any(directory.glob(pattern)) for pattern in _WEIGHTS)
    return (directory / "config.json").is_file() and any(any(directory.glob(one)) for one in _TOKENIZERS)


def _files(repo: str, directory: Path, *, needed: bool) -> list[str]:
    """Returns the names of a repository's files at the commit of a snapshot; without a network the GGUF files in it.

    If there are none, raises the error of the network if they are `needed`.
    """
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().list_repo_files(repo, revision=directory.name)
    except Exception:  # see `find_snapshot`
        there = [path.relative_to(directory).as_posix() for path in directory.rglob(f"*{SUFFIX}")]
        if needed and not there:
            raise
        return there


def _download(name: str, revision: str, patterns: Sequence[str], cache: str, foreign: Sequence[str] = _FOREIGN) -> Path:
    import huggingface_hub

    download: Callable[..., str] = cast(Any, huggingface_hub).snapshot_download
    wanted: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(foreign)}
    return Path(download(name, revision=revision or None, cache_dir=cache or None, **wanted))


def _reason(name: str, revision: str, error: Exception, cache: str) -> str:
    """Returns the reason why the model was not found and what to do, as the continuation of the caller's sentence."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, cache or constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at {hub}/{name}, then set HF_TOKEN to a token of that account."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r} at {hub}. Name a branch, a tag or a whole commit id."
    if isinstance(error, errors.RepositoryNotFoundError) or _status(error) == _UNAUTHORIZED:
        return f"{hub} has no model of this name, or a private one. Check the name; for a private one set HF_TOKEN."
    wanted = f"{name} at revision {revision!r}" if revision else name
    if constants.is_offline_mode():
        return (
            f"{wanted} is not, or not wholly, in the cache {cache}, while HF_HUB_OFFLINE forbids to download it. "
            f"Unset that, or run `hf download {name}` where there is a network and copy the cache, or give a directory."
        )
    return (
        f"{wanted} could not be had from {hub} ({_first_line(error)}), nor is the whole of it in the cache {cache}. "
        f"Check the network (HF_ENDPOINT names another hub), or give the path of a directory."
    )


def _status(error: Exception) -> int:
    response: Any = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0))


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
