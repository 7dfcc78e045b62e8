"""Writes the users of the bus and their permissions for containers and Kubernetes from `bus_permissions`.

    python -m infra.checks.bus_users [--check] [--namespace NAME]

Each kind of service has one user, whose password is a variable; `make_credentials.sh` generates its value. `--check`
writes nothing and fails if a file is out of date. `--namespace`: for deployments with another ANTIPHON_NAMESPACE.
"""

import argparse
import sys
from pathlib import Path

from antiphon.shared.security.bus_permissions import ROLES, permissions, render_user
from antiphon.shared.subjects import Subjects
from infra.checks.generated import keep

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    ROOT / "infra/nats/users.conf": "secrets/passwords.conf",
    ROOT / "infra/kubernetes/base/users.conf": "../secrets/passwords.conf",
}
"""The generated files, and the file of passwords that each includes."""
HEAD = """\
# Who may do what on the bus; whatever is not listed is denied. Written by `python -m infra.checks.bus_users` from
# shared/security/bus_permissions.py. make_credentials.sh draws the passwords.
"""


def render(passwords: str, namespace: str = "antiphon") -> str:
    """Returns the text of the file. `passwords`: the path of the file that it includes."""
    subjects = Subjects(namespace)
    users = (f"  {render_user(role, f'${role}_password', permissions(role, subjects))}\n" for role in ROLES)
    return f"{HEAD}include {passwords}\nauthorization {{ users: [\n{''.join(users)}] }}\n"


def main() -> int:
    """Writes the files, or checks them. Returns 1 if the check fails."""
    parser = argparse.ArgumentParser(prog="bus_users", description="users of the bus in containers and on Kubernetes")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--namespace", default="antiphon")
    options = parser.parse_args()
    command = "python -m infra.checks.bus_users"
    texts = {path: render(passwords, options.namespace) for path, passwords in FILES.items()}
    return max([keep(path, text, command, check=options.check) for path, text in texts.items()])


if __name__ == "__main__":
    sys.exit(main())
