"""What is installed where: dependency groups, exact versions, images, and the compose file, read as data."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from infra.checks import bus_users
from shared.security.bus_permissions import CONTAINER_ROLES as ROLES
from shared.version import __version__

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICES = ("gateway", "tokenizer", "engine", "detokenizer", "vision")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def requirements(*groups: str) -> set[str]:
    script = ROOT / "infra/docker/group_requirements.py"
    argv = [sys.executable, str(script), str(ROOT / "pyproject.toml"), *groups]
    return set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\n")) - {""}


def name_of(requirement: str) -> str:
    return re.split(r"[<>=~!;\[ ]", requirement)[0].lower().replace("_", "-")


def dockerfile(service: str) -> str:
    return (ROOT / f"infra/docker/{service}.Dockerfile").read_text()


def test_the_groups_of_the_services_and_the_launcher_make_up_the_project() -> None:
    assert requirements(*SERVICES, "launcher") == set(PYPROJECT["project"]["dependencies"])
    assert requirements("project") == set(PYPROJECT["project"]["dependencies"])


def test_only_engine_and_image_service_have_torch() -> None:
    holders = [service for service in SERVICES if "torch" in {name_of(r) for r in requirements(service)}]
    assert holders == ["engine", "vision"]


def test_every_requirement_has_an_exact_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in lines), "not exact"
    pinned = {name_of(line) for line in lines}
    assert {name_of(r) for r in requirements("project", "dev")} <= pinned
    assert "torch==2.13.0" in lines


def test_the_version_stands_in_one_file_and_the_packages_are_typed() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PYPROJECT["project"]
    path = PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{__version__}"' in (ROOT / path).read_text()
    for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_copies_its_service_alone_and_runs_it_as_no_root(service: str) -> None:
    text = dockerfile(service)
    copied = set(re.findall(r"^COPY services/(\w+) ", text, re.MULTILINE))
    assert copied == {service}
    assert f"pyproject.toml {service} >" in text
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in text
    assert f'"healthcheck.py", "{service}"' in text


def test_what_the_images_copy_is_in_the_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for service in SERVICES:
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(service), re.MULTILINE):
            for source in sources.split():
                assert (ROOT / source).exists()
                assert any(source == a or source.startswith(f"{a}/") for a in allowed), source


def test_the_engines_image_has_the_cpu_backend_for_every_processor_and_no_compiler() -> None:
    build, _, runtime = dockerfile("engine").partition("\nFROM python:3.11-slim-bookworm\n")
    assert "g++" in build
    assert "RUN python -m services.engine.cpu --all\n" in build
    assert "g++" not in runtime
    assert "COPY --from=compiled /app/services/engine/cpu/compiled services/engine/cpu/compiled\n" in runtime
    assert "services/engine/cpu/compiled" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_compose_file_holds_no_password_and_bounds_every_service() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"password\s*[:=]\s*\S", text, re.IGNORECASE)
    for service in SERVICES:
        settings = COMPOSE["services"][service]
        assert settings["restart"] == "unless-stopped"
        assert settings["stop_grace_period"] == "30s"
        assert settings["read_only"] is True
        assert settings["cap_drop"] == ["ALL"]
        assert settings["depends_on"]["nats"] == {"condition": "service_healthy"}


def test_all_gateways_share_one_port_of_the_host() -> None:
    assert "ports" not in COMPOSE["services"]["gateway"]
    balancer = COMPOSE["services"]["load-balancer"]
    assert balancer["ports"] == ["${PORT:-8000}:8000"]
    assert balancer["stop_grace_period"] == "30s"
    configuration = (ROOT / "infra/docker/haproxy.cfg").read_text()
    assert "bind :8000" in configuration
    assert len(re.findall(r"server-template \S+ \d+ gateway:8000", configuration)) == 2


def test_all_gateways_share_the_volume_of_files() -> None:
    gateway = COMPOSE["services"]["gateway"]
    assert gateway["command"] == ["--files-directory=/files"]
    assert "files:/files" in gateway["volumes"]
    assert "files" in COMPOSE["volumes"]
    # A new volume gets the owner of the directory in the image.
    assert "install -d -o antiphon /files" in dockerfile("gateway")


def test_the_bus_passwords_are_random_and_each_file_has_one_reader(tmp_path: Path) -> None:
    script = ROOT / "infra/nats/make_credentials.sh"
    # Only root may give a file away; for others a harmless stand-in does.
    (tmp_path / "chown").write_text("#!/bin/sh\n")
    (tmp_path / "chown").chmod(0o755)
    passwords: set[str] = set()
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        argv = ["env", f"PATH={tmp_path}:/usr/bin:/bin", "sh", str(script), str(folder)]
        subprocess.run(argv, check=True)
        first = {role: (folder / role / "credentials").read_text() for role in ROLES}
        subprocess.run(argv, check=True)
        assert {role: (folder / role / "credentials").read_text() for role in ROLES} == first
        for role, text in first.items():
            user, password = text.split(":")
            assert user == role
            assert f'{role}_password: "{password}"' in (folder / "server/passwords.conf").read_text()
            passwords.add(password)
        assert all(file.stat().st_mode & 0o077 == 0 for file in folder.rglob("*") if file.is_file())
    assert len(passwords) == 2 * len(ROLES)
    assert min(map(len, passwords)) >= 32


def test_a_container_has_the_password_of_its_service_only() -> None:
    for name in SERVICES:
        [bus] = [volume for volume in COMPOSE["services"][name]["volumes"] if volume.startswith("bus-")]
        assert bus == f"bus-{name}:/run/bus:ro"
    volumes = {name for name in COMPOSE["volumes"] if name.startswith("bus-")}
    assert volumes == {"bus-server", *(f"bus-{role}" for role in ROLES)}


def test_the_users_of_the_bus_are_those_of_the_table() -> None:
    assert all(path.read_text() == bus_users.render(passwords) for path, passwords in bus_users.FILES.items())


def test_traces_can_be_added_without_touching_the_compose_file() -> None:
    extra = yaml.safe_load((ROOT / "infra/docker/tracing.yml").read_text())["services"]
    assert set(extra) == {"jaeger", *SERVICES}
    assert {"16686:16686", "4318:4318"} <= set(extra["jaeger"]["ports"])
    assert "jaeger" not in COMPOSE["services"]


def test_every_command_of_the_makefile_is_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert phony
    shown = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert set(phony[1].split()) == set(re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE))


def test_every_package_is_named_in_an_import_contract() -> None:
    linter = PYPROJECT["tool"]["importlinter"]
    lists = [value for contract in linter["contracts"] for value in contract.values() if isinstance(value, list)]
    named = {name for words in lists for word in words for name in re.split(r" \| | -> ", word)}
    for root in linter["root_packages"]:
        for path in (ROOT / root).rglob("*/__init__.py"):
            package = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
            parent = package.rpartition(".")[0]
            assert package in named or (parent != root and parent in named), f"no import contract names {package}"
