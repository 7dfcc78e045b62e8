"""Builds the gateway's HTTP application: its routes and middleware.

The endpoints are in one package for each API, in `apis` and, where they are a guest's, in `guests`.
"""

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from antiphon.services.gateway import apis as api_room
from antiphon.services.gateway import guests as guest_room
from antiphon.services.gateway.apis.finding import find_apis
from antiphon.services.gateway.apis.openai.service_endpoints import LoadEndpoint, ServiceEndpoints
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.access.call import Strictness
from antiphon.services.gateway.edge.access.guard import GuardedBackend
from antiphon.services.gateway.edge.access.quotas import Quotas
from antiphon.services.gateway.edge.access.usage import UsageLedger
from antiphon.services.gateway.edge.access.usage_metrics import UsageCollector
from antiphon.services.gateway.edge.http import errors as http_errors
from antiphon.services.gateway.edge.http.access_log import AccessLog
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.browsers import BrowserRules
from antiphon.services.gateway.edge.http.edge import Edge
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.edge.http.shared_answers import SharedAnswers
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.ops.admin.engines import EngineEndpoints
from antiphon.services.gateway.ops.admin.models import ModelEndpoints
from antiphon.services.gateway.ops.console.page import ConsolePage
from antiphon.services.gateway.ops.console.requests import RequestEndpoints
from antiphon.services.gateway.ops.console.topology import TopologyEndpoint
from antiphon.services.gateway.ops.history.endpoint import HistoryEndpoint
from antiphon.services.gateway.ops.history.guest import History
from antiphon.services.gateway.ops.metrics.engines import EngineCollector
from antiphon.services.gateway.ops.metrics.members import MemberCollector
from antiphon.services.gateway.ops.timeline.directory import RecordDirectory
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import Backend
from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.liveness.changes import MemberChanges
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.services.gateway.path.placement.engine_controls import EngineControls
from antiphon.shared.clock import SystemClock
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import json_words
from antiphon.shared.messages import Heartbeat
from antiphon.shared.version import __version__

EXPOSED_HEADERS = (
    "x-request-id",
    "x-antiphon-ignored",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{fact}-{what}" for fact in ("limit", "remaining", "reset") for what in ("requests", "tokens")),
)
"""Response headers that web pages of other origins may read (CORS)."""
_ANY_METHOD = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]


def _no_heartbeats() -> Sequence[Heartbeat]:
    return ()


def _no_members() -> Sequence[tuple[Heartbeat, float]]:
    return ()


def create_app(
    backend: Backend,
    settings: GatewaySettings,
    *,
    keys: ApiKeys | None = None,
    quotas: Quotas | None = None,
    usage: UsageLedger | None = None,
    heartbeats: Callable[[], Sequence[Heartbeat]] = _no_heartbeats,
    records: RecordDirectory | None = None,
    members: Callable[[], Sequence[tuple[Heartbeat, float]]] = _no_members,
    engine_controls: EngineControls | None = None,
    guests: Guests | None = None,
    versions: VersionDirectory | None = None,
    history: History | None = None,
    changes: MemberChanges | None = None,
    gateway: str = "",
) -> FastAPI:
    """Returns the ASGI application. Its `state.apis` are told of the moments in the gateway's life (`Lifetime`).

    `keys`: the accepted API keys, by default those of `--api-keys`. `quotas`: their limits, by default counted by this
    gateway alone. `usage` receives the usage records; by default they are dropped. `heartbeats` returns the last
    heartbeat of each engine; it is called at each scrape of `/metrics`. `records` stores and finds the records of
    requests; by default there are none. `members` returns the topology. `engine_controls` drains engines. `guests` have
    further metrics, and offer APIs what these do not make themselves; without guests streams are not recorded, and
    responses are kept in this gateway's memory. `versions` changes the versions of models. `history` is given the
    metrics to take latencies from. `changes`: members that were lost. `gateway`: this one's id.
    """
    usage, quotas = usage or UsageLedger(), quotas or Quotas(clock=SystemClock())
    keys, guests = keys or ApiKeys(settings.api_keys), guests or Guests()
    records, changes = records or RecordDirectory(Recorder(0)), changes or MemberChanges(SystemClock())
    guests.offer(records)
    backend = GuardedBackend(backend, quotas, usage, settings.request_timeout, records.recorder.begin)
    collectors = [collector for guest in guests for collector in guest.collectors()]
    metrics = GatewayMetrics(EngineCollector(heartbeats), MemberCollector(members), UsageCollector(usage), *collectors)
    app, apis = _application(), find_apis(api_room, guest_room)
    formats = http_errors.ErrorFormats({start: form for api in apis for start, form in api.error_formats.items()})
    http_errors.install(app, metrics.count_error, formats)
    streaming = [path for api in apis for path in api.streaming]
    _add_edge(app, settings, keys, quotas, metrics, formats, streaming, guests.offered(SharedAnswers))
    _allow_pages(app, settings)
    serving = Serving(backend, metrics, settings, keys, guests)
    schemas = {start: schema for api in apis for start, schema in api.error_schemas.items()}
    routes = Routes(app, schemas, None if serving.streams is None else serving.streams.resumable)
    app.state.metrics = metrics
    app.state.apis = [api for api in apis if settings.use_openai or api.always]
    for api in app.state.apis:
        api.add(routes, serving)
    _add_probes(routes, ServiceEndpoints(backend, metrics), heartbeats)
    RequestEndpoints(records).add(routes)
    routes.get("/admin/topology", TopologyEndpoint(members, changes, gateway).topology)
    history = history or History(SystemClock(), members, changes)
    history.follow(metrics)
    HistoryEndpoint(history).add(routes)
    ConsolePage().add(routes)
    EngineEndpoints(engine_controls).add(routes)
    ModelEndpoints(versions, guests, backend).add(routes)
    if not settings.use_openai:
        _refuse_apis(app)
    routes.describe()
    return app


def _add_edge(
    app: FastAPI,
    settings: GatewaySettings,
    keys: ApiKeys,
    quotas: Quotas,
    metrics: GatewayMetrics,
    formats: http_errors.ErrorFormats,
    streaming: Sequence[str],
    shared: SharedAnswers | None,
) -> None:
    app.add_middleware(
        Edge,
        keys=keys,
        browsers=BrowserRules(settings, has_keys=keys.are_needed),
        quotas=quotas,
        metrics=metrics,
        formats=formats,
        prefix=settings.root_path.rstrip("/"),
        strict=Strictness(settings.unknown_parameters == "refuse", settings.long_outputs == "refuse"),
        streaming=streaming,
        shared=shared,
        access_log=AccessLog(is_on=settings.access_log),
    )


def _application() -> FastAPI:
    return FastAPI(
        title="Antiphon",
        description="Language models behind the OpenAI API.",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,  # `ConsolePage` has one that loads nothing from other hosts
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the gateway has its own
    )


def _allow_pages(app: FastAPI, settings: GatewaySettings) -> None:
    """Adds CORS for web pages of other origins, as the outermost middleware, because preflight requests have no key."""
    if origins := json_words(settings.allowed_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=json_words(settings.allowed_methods) or (),
            allow_headers=json_words(settings.allowed_headers) or (),
            allow_credentials=settings.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )


def _add_probes(routes: Routes, endpoints: ServiceEndpoints, heartbeats: Callable[[], Sequence[Heartbeat]]) -> None:
    # Scripts poll /health until a server can be used, so it reports readiness; /livez is for restart decisions.
    routes.get("/health", endpoints.readyz)
    routes.get("/readyz", endpoints.readyz)
    routes.get("/ping", endpoints.readyz)
    routes.post("/ping", endpoints.readyz)
    routes.get("/livez", endpoints.livez)
    routes.get("/metrics", endpoints.metrics, PlainTextResponse)
    routes.get("/load", LoadEndpoint(heartbeats).load)


def _refuse_apis(app: FastAPI) -> None:
    for path in ("/v1/{path:path}", "/api/{path:path}"):
        app.add_api_route(path, _without_apis, methods=_ANY_METHOD, include_in_schema=False)


def _without_apis() -> None:
    raise ServiceError(
        "not_found",
        "This server has no API but POST /generate, because it was started with USE_OPENAI=0 (--use-openai=false).",
    )
