"""Compiles the CPU backend ahead of its first use, beside its sources: `python -m services.engine.cpu [--all]`.

For the best of what this processor has, or with `--all` for every processor of its kind. Without a compiler that is a
notice, and with `--all`, which images use, a failure. With `--which` it compiles nothing and says what an engine would
compute with. Called by `make install`, the engine's image and `antiphon doctor`.
"""

import argparse
import platform
import sys

from services.engine.cpu.compile import VARIANTS, CompileError, Variant, make_library, usable_variants
from services.engine.cpu.library import BESIDE, describe


def main(arguments: list[str] | None = None) -> int:
    """The command."""
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
    """Makes the variants' libraries; 1 where one that `must` be cannot be made."""
    try:
        # Whoever may run the program may read what is compiled for it.
        BESIDE.mkdir(exist_ok=True)
        for variant in variants:
            sys.stdout.write(f"compiled: {make_library(variant, BESIDE).name}\n")
    except (CompileError, OSError) as error:
        sys.stderr.write(f"not compiled: {error}\nThe engine computes with PyTorch's operations instead.\n")
        return int(must)
    return 0


if __name__ == "__main__":
    sys.exit(main())
