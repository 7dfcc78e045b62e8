"""The dashboard and the alerts ask for metrics that exist, with labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from antiphon.services.gateway.edge.access.usage import UsageLedger
from antiphon.services.gateway.edge.access.usage_metrics import UsageCollector
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.ops.metrics.engines import EngineCollector
from antiphon.services.gateway.ops.metrics.members import MemberCollector
from antiphon.shared.messages import GatewayStatus
from tests.support.heartbeats import heartbeat
from tests.unit.gateway.test_metrics import ENGINE, beat

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra/monitoring"
DASHBOARD = json.loads((FOLDER / "dashboards/antiphon.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES += [rule["expr"] for rule in RULES]
NAME = re.compile(r"(?:vllm|antiphon):[A-Za-z0-9_:]+|\bup\b")


def known() -> set[str]:
    """The names of all samples that a gateway exports."""
    members = [(heartbeat("gateway", "g", "b", GatewayStatus(), interval_s=0.3), 0.1)]
    engines = EngineCollector(lambda: [beat("e0", ENGINE)])
    registry = GatewayMetrics(engines, MemberCollector(lambda: members), UsageCollector(UsageLedger())).registry
    names = {"up"}
    for family in registry.collect():
        names |= _samples(family)
    return names


def _samples(family: Metric) -> set[str]:
    if family.type == "histogram":
        return {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return {f"{family.name}_total"} if family.type == "counter" else {family.name}


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_metrics_that_exist(query: str):
    names = set(NAME.findall(query))
    assert names, "a query of nothing"
    assert names <= known(), names - known()
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


def test_every_alert_says_what_to_do():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert re.fullmatch(r"\d+[sm]", rule["for"])


def test_panels_are_distinct_and_do_not_overlap():
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["title"] for panel in DASHBOARD["panels"]})


def test_compose_provides_prometheus_and_grafana_with_these_files():
    extra: dict[str, Any] = yaml.safe_load((ROOT / "infra/docker/monitoring.yml").read_text())
    assert set(extra["services"]) == {"prometheus", "grafana"}
    for service in extra["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "not for other machines"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in extra["volumes"] or (ROOT / source).exists(), source
    [job] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert job["dns_sd_configs"][0]["names"][0] in compose
    source = yaml.safe_load((FOLDER / "datasource.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
