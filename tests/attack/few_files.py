"""`python -m tests.attack.few_files serve …`: `antiphon serve` that may open few files, as on a careful system."""

import resource
import sys

FILES = 256
"""Soft and hard limit of each process. Many systems have a soft limit of 1024, which an attacker reaches as well."""

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    from antiphon.cli import main

    sys.exit(main())
