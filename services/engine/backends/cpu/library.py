"""Finds the compiled library for this process, or compiles it and keeps it for the next start.

Libraries that the build of a container image or an installation compiled in advance are in a directory next to the
sources. Other libraries are kept in the user's cache directory, and only used if no other user could have written them:
the directory and all its parents must belong to this user or root. If there is no such directory, the library is
compiled into a temporary one for this process alone. Called by the CPU worker and by `__main__`.
"""

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.services.engine.backends.cpu.compile import (
    CompileError,
    Variant,
    find_compiler,
    library_name,
    make_library,
    usable_variants,
)
from antiphon.services.engine.backends.cpu.native import Library
from antiphon.shared.cache_dirs import is_private, is_usable, user_directory

if TYPE_CHECKING:
    # This module is also imported where container images are built, without numpy.
    from antiphon.services.engine.kv.pieces import NativeCopy

logger = logging.getLogger(__name__)

BESIDE = Path(__file__).parent / "compiled"
"""Directory of the libraries compiled in advance. They are trusted like the sources beside them."""
_CACHE = "~/.cache/antiphon/cpu"


def load_library(asked_cache: str = "") -> Library:
    """Returns the library for this processor, compiled if necessary. Raises `CompileError` or OSError."""
    cache, problem = cache_directory(asked_cache), CompileError("this processor is not supported")
    for variant in usable_variants():
        try:
            library = _found(variant, cache) or _made(variant, cache)
        except CompileError as error:
            # The compiler may be too old for this variant and still support the next one.
            problem = error
            continue
        if library.usable():
            logger.info("the CPU backend computes with %s", variant.name)
            return library
    raise problem


def compiled_copy() -> "NativeCopy | None":
    """Returns a compiled library's function that copies blocks, for workers that use no library; None without one.

    Compiles nothing.
    """
    for variant in usable_variants():
        library = _found(variant, cache_directory(""))
        if library is not None and library.usable():
            return library.copy_block
    return None


def describe(asked_cache: str = "") -> tuple[bool, str]:
    """Returns whether this process would use a library, and the library's description.

    Loads a compiled library if there is one; compiles nothing.
    """
    for variant in usable_variants():
        library = _found(variant, cache_directory(asked_cache))
        if library is None:
            ready = find_compiler() is not None
            return (
                ready,
                f"{variant.name}, {'compiled at the first start' if ready else 'but there is no C++ compiler'}",
            )
        if library.usable():
            return True, f"{variant.name}, compiled"
    return False, "none for this processor"


def cache_directory(asked: str) -> Path | None:
    """Returns the directory for libraries: the requested one or the user's cache; None for a user without a home."""
    return user_directory(asked, _CACHE)


def find_library(variant: Variant, cache: Path | None) -> Path | None:
    """Returns the path of a variant's compiled library; None if there is none that can be trusted."""
    name = library_name(variant)
    if (BESIDE / name).is_file():
        return BESIDE / name
    if cache is not None and (cache / name).is_file() and is_private(cache / name):
        return cache / name
    return None


def _found(variant: Variant, cache: Path | None) -> Library | None:
    path = find_library(variant, cache)
    if path is None:
        return None
    try:
        return Library(path)
    except OSError as error:
        logger.warning("%s cannot be loaded: %s", path, error)
        return None


def _made(variant: Variant, cache: Path | None) -> Library:
    """Compiles into the cache, or into a temporary directory if others can write the cache. Raises `CompileError`."""
    if cache is not None and is_usable(cache):
        logger.info("compiling the CPU backend for %s, once", variant.name)
        # If a library is already there, it could not be loaded.
        (cache / library_name(variant)).unlink(missing_ok=True)
        return Library(make_library(variant, cache))
    logger.info("compiling the CPU backend for %s: %s cannot keep it for the next start", variant.name, cache)
    try:
        with tempfile.TemporaryDirectory(prefix="antiphon-cpu-") as directory:
            return Library(make_library(variant, Path(directory)))
    except OSError as error:
        raise CompileError(f"there is no place to compile in: {error}") from error
