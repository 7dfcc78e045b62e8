"""Compiles the CPU backend before its first use: `python -m antiphon.services.engine.backends.cpu [--all]`.

The libraries are written to `compiled/` beside the sources: for the best instruction set of this processor, or with
`--all` for every instruction set of this machine's architecture. If a library cannot be compiled, the command prints a
notice and exits with status 0; with `--all`, which image builds use, it exits with 1. With `--which` the command
compiles nothing and prints the variant that an engine on this machine would use. Called by `make install`, the build of
the engine's image and `antiphon doctor`.
"""

import argparse
import platform
import sys

from antiphon.services.engine.backends.cpu.compile import VARIANTS, CompileError, Variant, make_library, usable_variants
from antiphon.services.engine.backends.cpu.library import BESIDE, describe


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description="Compiles the CPU backend ahead of its first use.")
    parser.add_argument("--all", action="store_true", help="for every processor of this machine's kind")
    parser.add_argument("--which", action="store_true", help="only say what an engine here computes with")
    options = parser.parse_args(arguments)
    if options.which:
        ready, what = describe()
        sys.stdout.write(f"{what}\n")
        return 0 if ready else 1
    kind = [variant for variant in VARIANTS if variant.machine == platform.machine()]
    return compile_beside(kind if options.all else usable_variants()[:1], must=options.all)


def compile_beside(variants: list[Variant], must: bool) -> int:
    """Compiles the variants' libraries into `BESIDE`. Returns 1 if that fails and `must` is true, else 0."""
    try:
        # Default permissions: every user who can run the program must be able to read the libraries.
        BESIDE.mkdir(exist_ok=True)
        for variant in variants:
            sys.stdout.write(f"compiled: {make_library(variant, BESIDE).name}\n")
    except (CompileError, OSError) as error:
        sys.stderr.write(f"not compiled: {error}\nThe engine computes with PyTorch's operations instead.\n")
        return int(must)
    return 0


if __name__ == "__main__":
    sys.exit(main())
