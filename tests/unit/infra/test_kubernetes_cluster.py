"""The manifests of a NATS cluster on Kubernetes: valid once their patches are applied, and three servers that meet."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from antiphon.launch.nats_server import find_binary
from tests.unit.infra.test_kubernetes import FOLDER, ROOT, SCHEMAS, SERVICES, resources

CLUSTER = FOLDER / "cluster"
HOSTS = [f"nats-{n}.nats-servers" for n in range(3)]


def patched() -> dict[tuple[str, str], Any]:
    """The objects of the kustomization by kind and name, with its JSON patches (RFC 6902) applied."""
    found = {(one["kind"], one["metadata"]["name"]): copy.deepcopy(one) for one in resources(CLUSTER)}
    for patch in yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())["patches"]:
        target = patch["target"]
        for (kind, name), one in found.items():
            if kind == target["kind"] and name == target.get("name", name):
                for step in yaml.safe_load((CLUSTER / patch["path"]).read_text()):
                    apply(one, step)
    return found


def apply(whole: Any, step: dict[str, Any]) -> None:
    *way, last = step["path"].removeprefix("/").split("/")
    for word in way:
        whole = whole[int(word)] if isinstance(whole, list) else whole[word]
    if isinstance(whole, list):
        assert (step["op"], last) == ("add", "-")
        whole.append(step["value"])
    elif step["op"] == "test":
        assert whole[last] == step["value"]
    else:
        assert (step["op"] == "replace") == (last in whole), step
        whole[last] = step["value"]


OBJECTS = patched()


@pytest.mark.parametrize("key", OBJECTS, ids="-".join)
def test_every_object_of_the_cluster_is_valid(key: tuple[str, str]):
    kubernetes_validate.validate(OBJECTS[key], SCHEMAS, strict=True)


def test_three_servers_have_names_volumes_and_nodes_of_their_own():
    spec = OBJECTS["StatefulSet", "nats"]["spec"]
    service = OBJECTS["Service", spec["serviceName"]]["spec"]
    assert spec["replicas"] == 3
    assert spec["podManagementPolicy"] == "Parallel"
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    [container] = spec["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]}.items() <= ports.items()
    [claim] = spec["volumeClaimTemplates"]
    [store] = [mount for mount in container["volumeMounts"] if mount["name"] == claim["metadata"]["name"]]
    assert f'store_dir: "{store["mountPath"]}/' in (CLUSTER / "nats.conf").read_text()
    [spread] = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "DoNotSchedule"


def test_a_majority_of_the_servers_stays_and_only_they_reach_the_routes():
    assert OBJECTS["PodDisruptionBudget", "nats"]["spec"]["maxUnavailable"] == 1
    spec = OBJECTS["NetworkPolicy", "routes-of-the-bus"]["spec"]
    servers = {"matchLabels": {"app.kubernetes.io/name": "nats"}}
    assert spec["podSelector"] == servers
    assert spec["ingress"] == [{"from": [{"podSelector": servers}], "ports": [{"protocol": "TCP", "port": 6222}]}]


@pytest.mark.parametrize("name", [*SERVICES, "setup"])
def test_each_service_knows_all_servers_and_keeps_three_copies(name: str):
    [container] = OBJECTS["Deployment", name]["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["ANTIPHON_NATS"] == ",".join(f"nats://{host}:4222" for host in HOSTS)
    assert values["ANTIPHON_BUS_REPLICAS"] == "3"


@pytest.mark.parametrize(
    ("single", "cluster"),
    [
        ("infra/kubernetes/base/nats.conf", "infra/kubernetes/cluster/nats.conf"),
        ("infra/nats/nats.conf", "infra/nats/container_cluster.conf"),
    ],
)
def test_a_server_of_a_cluster_has_the_limits_of_a_single_one(single: str, cluster: str):
    def limits(path: str) -> set[str]:
        return set(re.findall(r"^(?:max|write|ping)_\w+: .+$|max_\w+_store: \w+", (ROOT / path).read_text(), re.M))

    assert limits(cluster) == limits(single)


def test_the_servers_accept_their_configuration_with_the_drawn_routes(tmp_path: Path):
    subprocess.run([FOLDER / "make_secrets.sh", tmp_path / "drawn"], check=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "secrets").symlink_to(tmp_path / "drawn/server")
    (tmp_path / "config/nats.conf").write_text((CLUSTER / "nats.conf").read_text())
    (tmp_path / "config/users.conf").write_text((FOLDER / "base/users.conf").read_text())
    argv = [find_binary(), "--config", str(tmp_path / "config/nats.conf"), "-t"]
    subprocess.run(argv, env={"NATS_NAME": "nats-0"}, check=True, capture_output=True)
    routes = (tmp_path / "drawn/server/routes.conf").read_text()
    [password] = re.findall(r'authorization \{ user: "route", password: "(\w{48})"', routes)
    assert re.findall(r'"nats://route:(\w+)@(\S+):6222"', routes) == [(password, host) for host in HOSTS]
    [secret] = [
        v["secret"] for v in OBJECTS["StatefulSet", "nats"]["spec"]["template"]["spec"]["volumes"] if "secret" in v
    ]
    assert {item["key"] for item in secret["items"]} == {"passwords.conf", "routes.conf"}
