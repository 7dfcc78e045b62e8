"""The manifests for Kubernetes: valid by its schemas, complete, and in agreement with the rest of the repository."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from antiphon.shared.flags import json_words
from tests.unit.infra.test_monitoring import NAME, known

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra/kubernetes"
SERVICES = ("gateway", "tokenizer", "engine", "detokenizer")
SCHEMAS = "1.33"


def resources(folder: Path) -> Iterator[Any]:
    """Every object of a kustomization and of those that it builds on."""
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            yield from resources(path)
        else:
            yield from yaml.safe_load_all(path.read_text())


ALL = list(resources(FOLDER / "autoscaling"))


def of_kind(kind: str) -> dict[str, Any]:
    return {one["metadata"]["name"]: one for one in ALL if one["kind"] == kind}


def pod(name: str) -> Any:
    return {**of_kind("Deployment"), **of_kind("StatefulSet")}[name]["spec"]["template"]["spec"]


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_every_object_is_valid(one: Any):
    if one["apiVersion"].startswith("keda.sh/"):
        return  # a schema of its own, which is not part of Kubernetes
    kubernetes_validate.validate(one, SCHEMAS, strict=True)


def test_every_service_is_a_deployment_of_its_own_that_survives_disruption():
    assert set(of_kind("Deployment")) == {*SERVICES, "setup"}
    assert set(of_kind("PodDisruptionBudget")) == set(SERVICES)
    assert set(of_kind("Service")) == {"gateway", "nats"}
    for name, budget in of_kind("PodDisruptionBudget").items():
        labels = of_kind("Deployment")[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert of_kind("Deployment")[name]["spec"]["replicas"] >= 2


@pytest.mark.parametrize("name", [*SERVICES, "setup", "nats"])
def test_a_pod_has_no_rights_that_it_does_not_need(name: str):
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    [container] = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_like_its_image_and_is_probed(name: str):
    spec = pod(name)
    [container] = spec["containers"]
    dockerfile = (ROOT / f"infra/docker/{name}.Dockerfile").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}" in dockerfile
    assert container["image"] == f"antiphon-{name}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        told = container[probe]
        if name == "gateway":
            assert told["httpGet"]["path"] in ("/livez", "/readyz")
        else:
            assert told["exec"]["command"] == ["python", "healthcheck.py", name]
            assert told["timeoutSeconds"] >= 5, "longer than the check's own limit"
    # The health check knows a process by the id that it gets without --service-id: from the name of the pod.
    assert not any("service-id" in word for word in container["args"])
    assert spec["terminationGracePeriodSeconds"] > 20


def test_every_volume_secret_and_setting_exists():
    base = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())
    maps = {one["name"]: one for one in base["configMapGenerator"]}
    secrets = {one["name"]: one for one in base["secretGenerator"]}
    for name in (*SERVICES, "setup", "nats"):
        spec = pod(name)
        [container] = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                files = {Path(file).name for file in secrets[volume["secret"]["secretName"]]["files"]}
                assert {item["key"] for item in volume["secret"]["items"]} <= files
                assert volume["secret"]["defaultMode"] == 0o400
        for entry in container.get("env", ()):
            reference = entry.get("valueFrom", {}).get("configMapKeyRef")
            if reference:
                keys = {word.split("=")[0] for word in maps[reference["name"]]["literals"]}
                assert reference["key"] in keys
    assert {image["name"] for image in base["images"]} == {f"antiphon-{name}" for name in SERVICES}


MODELS = list(yaml.safe_load_all((FOLDER / "models/models.yaml").read_text()))


@pytest.mark.parametrize("one", MODELS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_the_pod_that_loads_models_is_valid(one: Any) -> None:
    kubernetes_validate.validate(one, SCHEMAS, strict=True)


def test_the_pod_that_loads_models_has_the_rights_of_an_engine_and_the_passwords_of_its_processes() -> None:
    spec, engine = MODELS[0]["spec"]["template"]["spec"], pod("engine")
    [container], [other] = spec["containers"], engine["containers"]
    assert (spec["securityContext"], container["securityContext"]) == (
        engine["securityContext"],
        other["securityContext"],
    )
    [bus] = [volume["projected"] for volume in spec["volumes"] if volume["name"] == "bus"]
    assert bus["defaultMode"] == 0o400
    drawn = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())["secretGenerator"]
    files = {one["name"]: one["files"] for one in drawn}
    roles = ("launcher", "tokenizer", "engine", "detokenizer")
    assert [source["secret"]["name"] for source in bus["sources"]] == [f"bus-{role}" for role in roles]
    for role, source in zip(roles, bus["sources"], strict=True):
        assert files[f"bus-{role}"] == [f"secrets/{role}/credentials"]
        assert source["secret"]["items"] == [{"key": "credentials", "path": f"{role}/credentials"}]


def test_other_pods_may_call_the_gateways_by_all_names_of_their_service():
    [container] = pod("gateway")["containers"]
    settings = {entry["name"]: entry for entry in container["env"]}
    assert settings["NAMESPACE"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    names = json_words(settings["ANTIPHON_ALLOWED_HOSTS"]["value"])
    assert names is not None
    assert [name.removeprefix("gateway") for name in names] == [
        "", ".$(NAMESPACE)", ".$(NAMESPACE).svc", ".$(NAMESPACE).svc.cluster.local",
    ]  # fmt: skip
    # A variable can be used by those that come after it.
    assert [*settings].index("NAMESPACE") < [*settings].index("ANTIPHON_ALLOWED_HOSTS")


def test_the_bus_has_the_limits_that_it_has_elsewhere():
    def limits(path: Path) -> set[str]:
        return set(re.findall(r"^(?:max|write|ping)_\w+: .+$", path.read_text(), re.MULTILINE))

    assert limits(FOLDER / "base/nats.conf") == limits(ROOT / "infra/nats/nats.conf")
    assert "include users.conf" in (FOLDER / "base/nats.conf").read_text()
    assert "include ../secrets/passwords.conf" in (FOLDER / "base/users.conf").read_text()


def test_the_passwords_are_drawn_once_and_readable_by_their_owner_only(tmp_path: Path):
    seen: list[set[str]] = []
    for _ in range(2):
        subprocess.run([FOLDER / "make_secrets.sh", tmp_path / "s"], check=True)
        passwords = (tmp_path / "s/server/passwords.conf").read_text()
        seen.append(set())
        for role in (*SERVICES, "observer", "setup"):
            user, password = (tmp_path / "s" / role / "credentials").read_text().split(":")
            assert (user, len(password)) == (role, 48)
            assert f'{role}_password: "{password}"' in passwords
            seen[-1].add(password)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 6
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "s").rglob("*") if file.is_file())


def test_each_service_has_its_own_password_only():
    for name in (*SERVICES, "setup"):
        [secret] = [volume["secret"] for volume in pod(name)["volumes"] if "secret" in volume]
        assert secret["secretName"] == f"bus-{name}"


def test_secrets_are_never_committed():
    ignored = (ROOT / ".gitignore").read_text()
    assert "/infra/kubernetes/base/secrets/" in ignored, "never committed"


def test_nobody_may_connect_but_those_who_are_named():
    policies = of_kind("NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    [rule] = policies["bus-from-services"]["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [4222]
    assert set(rule["from"][0]["podSelector"]["matchExpressions"][0]["values"]) == {*SERVICES, "setup"}


def test_each_service_scales_by_its_own_signal():
    assert set(of_kind("HorizontalPodAutoscaler")) == set(SERVICES) - {"engine"}
    [engine] = of_kind("ScaledObject").values()
    assert engine["spec"]["scaleTargetRef"]["name"] == "engine"
    for trigger in engine["spec"]["triggers"]:
        names = set(NAME.findall(trigger["metadata"]["query"]))
        assert names
        assert names <= known()
    for scaler in of_kind("HorizontalPodAutoscaler").values():
        assert scaler["spec"]["scaleTargetRef"]["name"] == scaler["metadata"]["name"]
