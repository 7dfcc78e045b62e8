"""Builds the gateway's HTTP application: its routes and middleware.

The endpoints are in one package for each API: `openai`, `native`, `anthropic`, `responses`, `ollama`, `files`,
`batches`.
"""

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from services.gateway.apis.finding import find_apis
from services.gateway.apis.openai.service_endpoints import LoadEndpoint, ServiceEndpoints
from services.gateway.apis.openai.serving import Serving
from services.gateway.edge.access.call import Strictness
from services.gateway.edge.access.guard import GuardedBackend
from services.gateway.edge.access.quotas import Quotas
from services.gateway.edge.access.usage import UsageLedger
from services.gateway.edge.access.usage_metrics import UsageCollector
from services.gateway.edge.http import errors as http_errors
from services.gateway.edge.http.auth import ApiKeys
from services.gateway.edge.http.browsers import BrowserRules
from services.gateway.edge.http.edge import Edge
from services.gateway.edge.http.in_process import InProcessClient
from services.gateway.edge.http.routing.routes import EventStream, Routes
from services.gateway.edge.metrics import GatewayMetrics
from services.gateway.guests.batches.batches import Batches
from services.gateway.guests.batches.endpoints import BatchEndpoints
from services.gateway.guests.batches.store import BatchStore
from services.gateway.guests.files.endpoints import FileEndpoints
from services.gateway.guests.files.store import FileStore
from services.gateway.guests.replay.endpoints import ReplayEndpoints
from services.gateway.guests.responses.conversations.conversations import Conversations
from services.gateway.guests.responses.conversations.endpoints import ConversationEndpoints
from services.gateway.guests.responses.conversations.store import ConversationStore, MemoryConversationStore
from services.gateway.guests.responses.endpoints import ResponseEndpoints
from services.gateway.guests.responses.pictures import PictureFiles
from services.gateway.guests.responses.routes import add_conversations, add_responses
from services.gateway.guests.responses.socket.connection import SocketEndpoint
from services.gateway.guests.responses.stored.store import ResponseStore
from services.gateway.guests.resume.background.requests import BackgroundStreams
from services.gateway.guests.resume.streams import Streams
from services.gateway.ops.admin.engines import EngineEndpoints
from services.gateway.ops.admin.models import Comparisons, ModelEndpoints
from services.gateway.ops.console.page import ConsolePage
from services.gateway.ops.console.requests import RequestEndpoints
from services.gateway.ops.console.topology import TopologyEndpoint
from services.gateway.ops.metrics.engines import EngineCollector
from services.gateway.ops.metrics.members import MemberCollector
from services.gateway.ops.timeline import RecordDirectory, Recorder
from services.gateway.path.generation import Backend
from services.gateway.path.guest import Guest
from services.gateway.path.models.versions import VersionDirectory
from services.gateway.path.placement.engine_controls import EngineControls
from shared.clock import SystemClock
from shared.config import GatewaySettings
from shared.errors import ServiceError
from shared.flags import json_words
from shared.messages import Heartbeat
from shared.version import __version__

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


def not_compared(model: str, version: int) -> None:
    """Returns None: no shadow requests have run on this version."""


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
    streams: Streams | None = None,
    finished_responses: ResponseStore | None = None,
    background: BackgroundStreams | None = None,
    conversations: ConversationStore | None = None,
    guests: Sequence[Guest] = (),
    versions: VersionDirectory | None = None,
    comparisons: Comparisons = not_compared,
) -> FastAPI:
    """Returns the ASGI application.

    `keys`: the accepted API keys, by default those of `--api-keys`. `quotas`: their limits, by default counted by this
    gateway alone. `usage` receives the usage records; by default they are dropped. `heartbeats` returns the last
    heartbeat of each engine; it is called at each scrape of `/metrics`. `records` stores and finds the records of
    requests; by default there are none. `members` returns the topology. `engine_controls` drains engines. `streams`
    records streams; by default none can be resumed. `finished_responses` stores the responses of `/v1/responses`, by
    default in this gateway's memory, and so does `conversations` those of `/v1/conversations`; `background` stores
    unfinished background responses. `versions` changes the versions of models, and `comparisons` returns the results of
    shadow requests. `guests` have further routes and metrics.
    """
    usage, quotas = usage or UsageLedger(), quotas or Quotas(clock=SystemClock())
    records = records or RecordDirectory(Recorder(0))
    backend = GuardedBackend(backend, quotas, usage, settings.request_timeout, records.recorder.begin)
    collectors = [collector for guest in guests for collector in guest.collectors()]
    metrics = GatewayMetrics(EngineCollector(heartbeats), MemberCollector(members), UsageCollector(usage), *collectors)
    app, apis = _application(), find_apis()
    formats = http_errors.ErrorFormats({start: form for api in apis for start, form in api.error_formats.items()})
    http_errors.install(app, metrics.count_error, formats)
    keys, files = keys or ApiKeys(settings.api_keys), FileStore(settings.files_directory)
    _add_edge(app, settings, keys, quotas, metrics, formats, [path for api in apis for path in api.streaming])
    _allow_pages(app, settings)
    serving = Serving(backend, metrics, settings, streams)
    routes = Routes(app, {start: schema for api in apis for start, schema in api.error_schemas.items()}, streams)
    for api in apis:
        if settings.use_openai or api.always:
            api.add(routes, serving)
    _add_probes(routes, ServiceEndpoints(backend, metrics), heartbeats)
    _add_console(routes, records, members)
    EngineEndpoints(engine_controls).add(routes)
    ModelEndpoints(versions, comparisons).add(routes)
    ReplayEndpoints(records, serving).add(routes)
    kept = Conversations(conversations or MemoryConversationStore())
    own = ResponseEndpoints(serving, finished_responses, background, keys, PictureFiles(files), kept)
    app.state.responses, app.state.batches = own.recorded, None
    if settings.use_openai:
        app.state.batches = _add_guests(routes, backend, guests, streams, own, kept, files, keys, metrics)
    else:
        _refuse_apis(app)
    routes.describe()
    return app


def _add_console(
    routes: Routes, records: RecordDirectory, members: Callable[[], Sequence[tuple[Heartbeat, float]]]
) -> None:
    RequestEndpoints(records).add(routes)
    routes.get("/admin/topology", TopologyEndpoint(members).topology)
    ConsolePage().add(routes)


def _add_guests(
    routes: Routes,
    backend: Backend,
    guests: Sequence[Guest],
    streams: Streams | None,
    made: ResponseEndpoints,
    conversations: Conversations,
    files: FileStore,
    keys: ApiKeys,
    metrics: GatewayMetrics,
) -> Batches:
    """Adds the routes of guests. Returns the batches, which send requests themselves."""
    for route in (route for guest in guests for route in guest.routes(backend)):
        routes.post(route.path, route.endpoint, route.body)
    if streams is not None:
        routes.get("/v1/streams/{stream_id}", streams.retrieve, EventStream)
    add_responses(routes, made, SocketEndpoint(lambda: routes.app, metrics.count_error))
    add_conversations(routes, ConversationEndpoints(conversations))
    FileEndpoints(files).add(routes)
    running = Batches(BatchStore(files), InProcessClient(lambda: routes.app), keys)
    BatchEndpoints(running).add(routes)
    return running


def _add_edge(
    app: FastAPI,
    settings: GatewaySettings,
    keys: ApiKeys,
    quotas: Quotas,
    metrics: GatewayMetrics,
    formats: http_errors.ErrorFormats,
    streaming: Sequence[str],
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
    )


def _application() -> FastAPI:
    return FastAPI(
        title="Antiphon",
        description="Language models behind the OpenAI API.",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,  # `_add_console` has a page that loads nothing from other hosts
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the gateway has its own
    )


async def continue_batches(app: FastAPI) -> None:
    """Continues the batches of gateways that have ended. Called when the application can answer requests."""
    running: Batches | None = app.state.batches
    if running is not None:
        await running.continue_all()


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
