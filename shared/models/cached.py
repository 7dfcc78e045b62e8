"""The models on this disk that are served by name: those in the hub's cache, and GGUF files that were served.

A repository of GGUF files has an entry for each of them, with its tag. The hub's library finds and deletes what is in
its cache; of a GGUF file elsewhere only the converted configuration and tokenizer are in a cache and can be removed.
Called by `antiphon list`, `antiphon rm` and `antiphon pull`.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from antiphon.shared.models.gguf_model.names import SUFFIX, models_among, quantization_of, stem_of
from antiphon.shared.settings.quantization import quantization_settings

_WEIGHTS = (".safetensors", ".bin")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that can be served under its name without a download."""

    name: str
    """`org/repo`, `org/repo:TAG`, or the path of a GGUF file."""
    source: Literal["hub", "file"]
    size: int
    """Bytes of its files."""
    last_used: float
    """Seconds since 1970."""
    quantization: str
    """Such as `Q4_K_M`, `awq` or `BF16`; '' if it is not known."""
    links: tuple[Path, ...] = ()
    """Of a GGUF file of a repository: its links in the snapshots."""
    made: tuple[Path, ...] = ()
    """The directories that were made from its GGUF file."""

    @property
    def repo(self) -> str:
        """The repository of a model of the hub."""
        return self.name.partition(":")[0]


def cached_models(cache: str = "") -> list[CachedModel]:
    """Returns all models, sorted by name. `cache`: the directory of the hub's cache, '' for the usual one."""
    models = [model for repo in _repos(cache) for model in _of_repo(repo)]
    made = _conversions()
    found = [_with_conversions(model, made) for model in models]
    taken = {directory for model in found for directory in model.made}
    rest: dict[Path, list[Path]] = {}
    for directory, links in made.items():
        if directory not in taken:
            rest.setdefault(links[0].resolve(), []).append(directory)
    return sorted([*found, *(_of_file(file, each) for file, each in rest.items())], key=lambda model: model.name)


def remove(model: CachedModel, cache: str = "") -> int:
    """Removes a model from the caches and returns the freed bytes. A GGUF file outside of them stays."""
    freed = sum(_size(directory) for directory in model.made)
    for directory in model.made:
        shutil.rmtree(directory, ignore_errors=True)
    if model.source == "file":
        return freed
    repos = [repo for repo in _repos(cache) if repo.repo_id == model.repo]
    others = [other for repo in repos for other in _of_repo(repo) if other.name != model.name]
    return freed + (_remove_files(repos, model.links) if model.links and others else _remove_repos(repos, cache))


def _repos(cache: str) -> list[Any]:
    """Returns the models' repositories in the hub's cache, as its library describes them."""
    import huggingface_hub

    try:
        found = _scan(cache)
    except (huggingface_hub.CacheNotFound, ValueError):
        return []  # nothing was downloaded yet
    return [repo for repo in found.repos if repo.repo_type == "model"]


def _scan(cache: str) -> Any:
    import huggingface_hub
    from huggingface_hub import constants

    return huggingface_hub.scan_cache_dir(cache or constants.HF_HUB_CACHE)


def _of_repo(repo: Any) -> list[CachedModel]:
    files = [(file, revision) for revision in repo.revisions for file in revision.files]
    names: dict[str, list[Any]] = {}
    for file, revision in files:
        names.setdefault(file.file_path.relative_to(revision.snapshot_path).as_posix(), []).append(file)
    ggufs: dict[str, list[Any]] = {}
    for parts in models_among(names):
        tag = quantization_of(parts[0]) or stem_of(parts[0])
        ggufs.setdefault(tag, []).extend(file for part in parts for file in names[part])
    if not names:
        return []
    models = [_of_gguf(f"{repo.repo_id}:{tag}", each) for tag, each in ggufs.items()]
    others = [file for name, each in names.items() if not name.endswith(SUFFIX) for file in each]
    if models and not any(file.file_path.suffix in _WEIGHTS for file in others):
        return models
    whole = CachedModel(
        name=repo.repo_id,
        source="hub",
        size=_bytes_of(others),
        last_used=max((file.blob_last_accessed for file in others), default=repo.last_accessed),
        quantization=_quantization(names.get("config.json", [])),
    )
    return [*models, whole]


def _of_gguf(name: str, files: Sequence[Any]) -> CachedModel:
    return CachedModel(
        name=name,
        source="hub",
        size=_bytes_of(files),
        last_used=max(file.blob_last_accessed for file in files),
        quantization=quantization_of(files[0].file_path.name),
        links=tuple(file.file_path for file in files),
    )


def _of_file(file: Path, made: Sequence[Path]) -> CachedModel:
    """Returns the entry of a GGUF file outside of the hub's cache."""
    links = [link.resolve() for link in made[0].glob(f"*{SUFFIX}")]
    return CachedModel(
        name=str(file),
        source="file",
        size=sum(link.stat().st_size for link in links if link.is_file()),
        last_used=max(directory.stat().st_mtime for directory in made),
        quantization=quantization_of(file.name),
        made=tuple(made),
    )


def _with_conversions(model: CachedModel, made: dict[Path, list[Path]]) -> CachedModel:
    blobs = {link.resolve() for link in model.links}
    own = tuple(directory for directory, links in made.items() if blobs & {link.resolve() for link in links})
    if not own:
        return model
    # A conversion is touched whenever the model is started, also where the file system records no reads.
    last_used = max(model.last_used, *(directory.stat().st_mtime for directory in own))
    return replace(model, made=own, last_used=last_used)


def _conversions() -> dict[Path, list[Path]]:
    """Returns the directories that were made from GGUF files, with their links to these files."""
    from antiphon.shared.models.gguf_model.directory import made_directories

    found = {directory: sorted(directory.glob(f"*{SUFFIX}")) for directory in made_directories()}
    return {directory: links for directory, links in found.items() if links}


def _remove_files(repos: Iterable[Any], links: Sequence[Path]) -> int:
    """Removes links from the snapshots, and the files that no other link needs. Returns the freed bytes."""
    files = [file for repo in repos for revision in repo.revisions for file in revision.files]
    kept = {file.blob_path for file in files if file.file_path not in links}
    gone = {file.blob_path: file.size_on_disk for file in files if file.blob_path not in kept}
    for path in (*links, *gone):
        path.unlink(missing_ok=True)
    return sum(gone.values())


def _remove_repos(repos: Iterable[Any], cache: str) -> int:
    hashes = [revision.commit_hash for repo in repos for revision in repo.revisions]
    strategy = _scan(cache).delete_revisions(*hashes)
    strategy.execute()
    return strategy.expected_freed_size


def _bytes_of(files: Iterable[Any]) -> int:
    return sum({file.blob_path: file.size_on_disk for file in files}.values())


def _size(directory: Path) -> int:
    """Returns the bytes of a directory's own files, without what its links point to."""
    return sum(path.lstat().st_size for path in directory.iterdir())


def _quantization(configs: Sequence[Any]) -> str:
    """Returns the quantization in the newest config.json, or else the type of the weights."""
    for file in sorted(configs, key=lambda file: file.blob_last_modified, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            found: Any = json.loads(file.file_path.read_bytes())
            if isinstance(found, dict):
                config = cast(dict[str, Any], found)
                dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
                return str(quantization_settings(config).get("quant_method") or _DTYPES.get(dtype, dtype))
    return ""
