"""Builds the gateway's HTTP application: its routes and middleware.

The endpoints are in one package for each API: `openai`, `native`, `anthropic`, `responses`, `ollama`, `files`,
`batches`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, PlainTextResponse, Response

from services.gateway import anthropic, batches, native, ollama, responses
from services.gateway.access.guard import GuardedBackend
from services.gateway.access.quotas import Quotas
from services.gateway.access.usage import UsageLedger
from services.gateway.access.usage_metrics import UsageCollector
from services.gateway.adapters import endpoints as adapters
from services.gateway.admin import engines as admin_engines
from services.gateway.admin import models as admin_models
from services.gateway.anthropic.endpoints import MessageEndpoints
from services.gateway.batches.batches import Batches
from services.gateway.batches.endpoints import BatchEndpoints
from services.gateway.batches.store import BatchStore
from services.gateway.console.page import ConsolePage
from services.gateway.console.requests import RequestEndpoints
from services.gateway.console.topology import TopologyEndpoint
from services.gateway.engine_metrics import EngineCollector
from services.gateway.files.endpoints import FileEndpoints
from services.gateway.files.store import FileStore
from services.gateway.generation import Backend
from services.gateway.http import errors as http_errors
from services.gateway.http.auth import ApiKeys
from services.gateway.http.direct_route import DirectRoute, is_direct
from services.gateway.http.edge import Edge
from services.gateway.http.in_process import InProcessClient
from services.gateway.member_metrics import MemberCollector
from services.gateway.metrics import GatewayMetrics
from services.gateway.native.endpoint import GenerateEndpoint
from services.gateway.ollama.endpoints import OllamaEndpoints
from services.gateway.openai import openapi
from services.gateway.openai.chat import ChatEndpoint
from services.gateway.openai.completions import CompletionEndpoint
from services.gateway.openai.pooling.endpoints import PoolingEndpoints
from services.gateway.openai.service_endpoints import ServiceEndpoints
from services.gateway.openai.serving import Serving
from services.gateway.record import RecordDirectory, Recorder
from services.gateway.replay import endpoints as replay
from services.gateway.responses.endpoints import ResponseEndpoints
from services.gateway.responses.pictures import PictureFiles
from services.gateway.responses.stored.store import ResponseStore
from services.gateway.shadow import ShadowCollector
from services.gateway.streams.background.requests import BackgroundStreams
from services.gateway.streams.streams import Endpoint, Streams
from shared.clock import SystemClock
from shared.config import GatewaySettings
from shared.errors import ServiceError
from shared.flags import json_words
from shared.messages import Heartbeat
from shared.version import __version__

EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{fact}-{what}" for fact in ("limit", "remaining", "reset") for what in ("requests", "tokens")),
)
"""Response headers that web pages of other origins may read (CORS)."""
BODIES = {
    **openapi.BODIES,
    **native.BODIES,
    **anthropic.BODIES,
    **responses.BODIES,
    **ollama.BODIES,
    **batches.BODIES,
    **adapters.BODIES,
    **admin_engines.BODIES,
    **admin_models.BODIES,
    **replay.BODIES,
}
"""The body of each POST route that has one, by its path."""
ERROR_FORMATS = {**anthropic.ERROR_FORMATS, **ollama.ERROR_FORMATS}
"""The format of error objects under the paths of APIs other than OpenAI's."""
ERROR_SCHEMAS = {**anthropic.ERROR_SCHEMAS, **ollama.ERROR_SCHEMAS}
"""The schemas of those error objects."""
_ANY_METHOD = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]


class EventStream(Response):
    """Placeholder for an event stream in the OpenAPI schema."""

    media_type = "text/event-stream"


class JsonLines(Response):
    """Placeholder for a batch file in the OpenAPI schema."""

    media_type = "application/jsonl"


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
    engine_controls: admin_engines.Controls | None = None,
    streams: Streams | None = None,
    finished_responses: ResponseStore | None = None,
    background: BackgroundStreams | None = None,
    collectors: Sequence[Collector] = (),
    versions: admin_models.Versions | None = None,
    comparisons: admin_models.Comparisons | None = None,
) -> FastAPI:
    """Returns the ASGI application.

    `keys`: the accepted API keys, by default those of `--api-keys`. `quotas`: their limits, by default counted by this
    gateway alone. `usage` receives the usage records; by default they are dropped. `heartbeats` returns the last
    heartbeat of each engine; it is called at each scrape of `/metrics`. `records` stores and finds the records of
    requests; by default there are none. `members` returns the topology. `engine_controls` drains engines. `streams`
    records streams; by default none can be resumed. `finished_responses` stores the responses of `/v1/responses`, by
    default in this gateway's memory; `background` stores unfinished background responses. `versions` changes the
    versions of models, and `comparisons` has the results of shadow requests. `collectors`: further metrics.
    """
    usage, records = usage or UsageLedger(), records or RecordDirectory(Recorder(0))
    backend = GuardedBackend(
        backend, quotas or Quotas(SystemClock()), usage, settings.request_timeout, records.recorder
    )
    compared = {} if comparisons is None else comparisons
    collectors = [ShadowCollector(compared), *collectors]
    metrics = GatewayMetrics(EngineCollector(heartbeats), MemberCollector(members), UsageCollector(usage), *collectors)
    app = _application()
    formats = http_errors.ErrorFormats(ERROR_FORMATS)
    http_errors.install(app, metrics.count_error, formats)
    keys, prefix = keys or ApiKeys(settings.api_keys), settings.root_path.rstrip("/")
    streaming, files = ollama.STREAMING, FileStore(settings.files_directory)
    app.add_middleware(Edge, keys=keys, metrics=metrics, formats=formats, prefix=prefix, streaming=streaming)
    _allow_pages(app, settings)
    serving = Serving(backend, metrics, settings, streams)
    if settings.use_openai:
        _add_generation(app, serving, streams)  # first, because routes are tried in their order
    _post(app, "/generate", GenerateEndpoint(serving).generate)
    _add_probes(app, ServiceEndpoints(backend, metrics))
    _add_console(app, RequestEndpoints(records), TopologyEndpoint(members), ConsolePage())
    _add_admin(app, admin_engines.EngineEndpoints(engine_controls), admin_models.ModelEndpoints(versions, compared))
    _add_replay(app, replay.ReplayEndpoints(records, serving))
    own = ResponseEndpoints(serving, finished_responses, background, keys, PictureFiles(files))
    app.state.responses = own.recorded
    app.state.batches = _add_apis(app, serving, keys, streams, own, files) if settings.use_openai else _refuse_apis(app)
    openapi.add_schemas(app, [*BODIES.values()], [*ERROR_SCHEMAS.values()])
    return app


def _application() -> FastAPI:
    return FastAPI(
        title="Antiphon",
        description="Language models behind the OpenAI API.",
        version=__version__,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the gateway has its own
    )


def _add_apis(
    app: FastAPI,
    serving: Serving,
    keys: ApiKeys,
    streams: Streams | None,
    made: ResponseEndpoints,
    files: FileStore,
) -> Batches:
    """Adds the APIs besides `/generate` and `_add_generation`. Returns the batches, which send requests themselves."""
    _add_pooling(app, PoolingEndpoints(serving.backend, serving.metrics))
    _add_service(app, ServiceEndpoints(serving.backend, serving.metrics, serving.defaults.pictures_max))
    _add_adapters(app, adapters.AdapterEndpoints(serving.backend))
    _add_anthropic(app, MessageEndpoints(serving), streams)
    _add_responses(app, made, streams)
    _add_ollama(app, OllamaEndpoints(serving))
    _add_files(app, FileEndpoints(files))
    running = Batches(BatchStore(files), InProcessClient(lambda: app), keys)
    _add_batches(app, BatchEndpoints(running))
    return running


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


def _add_generation(app: FastAPI, serving: Serving, streams: Streams | None) -> None:
    _post_resumable(app, "/v1/completions", CompletionEndpoint(serving).completions, streams)
    _post_resumable(app, "/v1/chat/completions", ChatEndpoint(serving).chat_completions, streams)
    if streams is not None:
        _get(app, "/v1/streams/{stream_id}", streams.retrieve, EventStream)


def _add_pooling(app: FastAPI, endpoints: PoolingEndpoints) -> None:
    # Servers have different paths for score and rerank, and each client has one of them built in.
    _post(app, "/v1/embeddings", endpoints.embeddings)
    for path in ("/v1/classify", "/classify"):
        _post(app, path, endpoints.classify)
    for path in ("/v1/score", "/score"):
        _post(app, path, endpoints.score)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        _post(app, path, endpoints.rerank)


def _add_anthropic(app: FastAPI, endpoints: MessageEndpoints, streams: Streams | None) -> None:
    _post_resumable(app, "/v1/messages", endpoints.messages, streams)
    _post(app, "/v1/messages/count_tokens", endpoints.count_tokens)


def _add_responses(app: FastAPI, endpoints: ResponseEndpoints, streams: Streams | None) -> None:
    _post_resumable(app, "/v1/responses", endpoints.create, streams)
    _get(app, "/v1/responses/{response_id}", endpoints.retrieve)
    _delete(app, "/v1/responses/{response_id}", endpoints.delete)
    _post(app, "/v1/responses/{response_id}/cancel", endpoints.cancel)
    _get(app, "/v1/responses/{response_id}/input_items", endpoints.input_items)


def _add_ollama(app: FastAPI, endpoints: OllamaEndpoints) -> None:
    _post(app, "/api/chat", endpoints.chat)
    _post(app, "/api/generate", endpoints.generate)
    _post(app, "/api/show", endpoints.show)
    _get(app, "/api/tags", endpoints.tags)
    _get(app, "/api/version", endpoints.version)


def _add_files(app: FastAPI, endpoints: FileEndpoints) -> None:
    _post(app, "/v1/files", endpoints.upload)
    _get(app, "/v1/files", endpoints.list)
    _get(app, "/v1/files/{file_id}", endpoints.retrieve)
    _get(app, "/v1/files/{file_id}/content", endpoints.content, JsonLines)
    _delete(app, "/v1/files/{file_id}", endpoints.delete)


def _add_batches(app: FastAPI, endpoints: BatchEndpoints) -> None:
    _post(app, "/v1/batches", endpoints.create)
    _get(app, "/v1/batches", endpoints.list)
    _get(app, "/v1/batches/{batch_id}", endpoints.retrieve)
    _post(app, "/v1/batches/{batch_id}/cancel", endpoints.cancel)


def _add_service(app: FastAPI, endpoints: ServiceEndpoints) -> None:
    _post(app, "/tokenize", endpoints.tokenize)
    _post(app, "/detokenize", endpoints.detokenize)
    _get(app, "/v1/models", endpoints.models)
    _get(app, "/v1/models/{model_id:path}", endpoints.model)
    _get(app, "/version", endpoints.version)


def _add_adapters(app: FastAPI, endpoints: adapters.AdapterEndpoints) -> None:
    _post(app, "/v1/load_lora_adapter", endpoints.load)
    _post(app, "/v1/unload_lora_adapter", endpoints.unload)


def _add_probes(app: FastAPI, endpoints: ServiceEndpoints) -> None:
    # Scripts poll /health until a server can be used, so it reports readiness; /livez is for restart decisions.
    _get(app, "/health", endpoints.readyz)
    _get(app, "/readyz", endpoints.readyz)
    _get(app, "/livez", endpoints.livez)
    _get(app, "/metrics", endpoints.metrics, PlainTextResponse)


def _add_console(app: FastAPI, requests: RequestEndpoints, topology: TopologyEndpoint, page: ConsolePage) -> None:
    _get(app, "/v1/requests", requests.list)
    _get(app, "/v1/requests/{request_id}", requests.retrieve)
    _get(app, "/v1/requests/{request_id}/timeline", requests.timeline)
    _get(app, "/admin/topology", topology.topology)
    for path in ("/", "/console/{name:path}"):
        app.add_api_route(path, page.file, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _add_admin(app: FastAPI, engines: admin_engines.EngineEndpoints, models: admin_models.ModelEndpoints) -> None:
    _get(app, "/admin/engines/{engine_id}", engines.retrieve)
    _post(app, "/admin/engines/{engine_id}/drain", engines.drain)
    _post(app, "/admin/engines/{engine_id}/resume", engines.resume)
    _get(app, "/admin/models", models.list)
    _post(app, "/admin/models", models.set)
    _post(app, "/admin/models/rollback", models.roll_back)
    _post(app, "/admin/models/shadow", models.shadow)


def _add_replay(app: FastAPI, endpoints: replay.ReplayEndpoints) -> None:
    _get(app, "/v1/requests/{request_id}/record", endpoints.record)
    _get(app, "/v1/requests/{request_id}/output", endpoints.output)
    _post(app, "/v1/requests/{request_id}/replay", endpoints.replay)
    _post(app, "/v1/requests/{request_id}/fork", endpoints.fork)
    _post(app, "/v1/replay", endpoints.replay_record)


def _refuse_apis(app: FastAPI) -> None:
    for path in ("/v1/{path:path}", "/api/{path:path}"):
        app.add_api_route(path, _without_apis, methods=_ANY_METHOD, include_in_schema=False)


def _without_apis() -> None:
    raise ServiceError(
        "not_found",
        "This server has no API but POST /generate, because it was started with USE_OPENAI=0 (--use-openai=false).",
    )


def _error_responses(path: str) -> dict[int | str, dict[str, Any]]:
    found = next((ERROR_SCHEMAS[one] for one in ERROR_SCHEMAS if path.startswith(one)), openapi.ERROR)
    return openapi.error_responses(found)


def _post(app: FastAPI, path: str, endpoint: Callable[..., object]) -> None:
    app.router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        openapi_extra=openapi.request_body(BODIES[path]) if path in BODIES else None,
        responses=_error_responses(path),
        response_model=None,
        route_class_override=DirectRoute if is_direct(endpoint) else None,
    )


def _post_resumable(app: FastAPI, path: str, endpoint: Endpoint, streams: Streams | None) -> None:
    """Adds a route whose streams can be resumed, if streams are recorded."""
    _post(app, path, endpoint if streams is None else streams.resumable(path, endpoint))


def _get(app: FastAPI, path: str, endpoint: Callable[..., object], answer: type[Response] = JSONResponse) -> None:
    """Adds a route. `answer`: a response class whose media type appears in the OpenAPI schema."""
    app.add_api_route(
        path,
        endpoint,
        methods=["GET"],
        responses=_error_responses(path),
        response_class=answer,
        response_model=None,
    )
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)


def _delete(app: FastAPI, path: str, endpoint: Callable[..., object]) -> None:
    app.add_api_route(path, endpoint, methods=["DELETE"], responses=_error_responses(path), response_model=None)
