"""Compiles the CPU backend ahead of its first use, beside its sources: `python -m services.engine.cpu [--all]`.

For the best of what this processor has, or with `--all` for every processor of its kind. Without a compiler that is a
notice, and with `--all`, which images use, a failure. Called by `make install` and the engine's image.
"""

import argparse
import platform
import sys

from services.engine.cpu.compile import BESIDE, VARIANTS, CompileError, find_library, make_library, usable_variants


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Compiles the CPU backend ahead of its first use.")
    parser.add_argument("--all", action="store_true", help="for every processor of this machine's kind")
    options = parser.parse_args(arguments)
    kind = [variant for variant in VARIANTS if variant.machine == platform.machine()]
    for variant in kind if options.all else usable_variants()[:1]:
        if find_library(variant, BESIDE) is not None:
            continue
        try:
            sys.stdout.write(f"compiled {make_library(variant, BESIDE).name}\n")
        except CompileError as error:
            sys.stderr.write(f"not compiled: {error}. The engine computes with PyTorch's operations instead.\n")
            return int(options.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
