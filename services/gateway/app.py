"""Builds the gateway's HTTP application: its routes and middleware. The endpoints are in `openai`."""

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from services.gateway.access.guard import GuardedBackend
from services.gateway.access.quotas import Quotas
from services.gateway.access.usage import UsageLedger
from services.gateway.access.usage_metrics import UsageCollector
from services.gateway.engine_metrics import EngineCollector
from services.gateway.generation import Backend
from services.gateway.http import errors as http_errors
from services.gateway.http.auth import ApiKeys
from services.gateway.http.edge import Edge
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import openapi
from services.gateway.openai.endpoints import GenerationEndpoints
from services.gateway.openai.service_endpoints import ServiceEndpoints
from shared.clock import SystemClock
from shared.config import GatewaySettings
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


def _no_heartbeats() -> Sequence[Heartbeat]:
    return ()


def create_app(
    backend: Backend,
    settings: GatewaySettings,
    *,
    keys: ApiKeys | None = None,
    quotas: Quotas | None = None,
    usage: UsageLedger | None = None,
    heartbeats: Callable[[], Sequence[Heartbeat]] = _no_heartbeats,
) -> FastAPI:
    """Returns the ASGI application.

    `keys`: the accepted API keys, by default those of `--api-keys`. `quotas`: their limits, by default counted by this
    gateway alone. `usage` takes the usage records, which by default go nowhere. `heartbeats` returns the last heartbeat
    of each engine; it is called at each scrape of `/metrics`.
    """
    usage = usage or UsageLedger()
    backend = GuardedBackend(backend, quotas or Quotas(SystemClock()), usage, settings.request_timeout)
    metrics = GatewayMetrics(EngineCollector(heartbeats), UsageCollector(usage))
    app = FastAPI(
        title="Antiphon",
        description="Language models behind the OpenAI API.",
        version=__version__,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    http_errors.install(app, metrics.count_error)
    keys = keys or ApiKeys(settings.api_keys)
    app.add_middleware(Edge, keys=keys, metrics=metrics, prefix=settings.root_path.rstrip("/"))
    _allow_pages(app, settings)
    _add_generation(app, GenerationEndpoints(backend, metrics, settings))
    _add_service(app, ServiceEndpoints(backend, metrics))
    openapi.add_schemas(app)
    return app


def _allow_pages(app: FastAPI, settings: GatewaySettings) -> None:
    """Adds CORS for web pages of other origins. Outermost, because a browser's preflight request carries no key."""
    if origins := json_words(settings.allowed_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=json_words(settings.allowed_methods) or (),
            allow_headers=json_words(settings.allowed_headers) or (),
            allow_credentials=settings.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )


def _add_generation(app: FastAPI, endpoints: GenerationEndpoints) -> None:
    _post(app, "/v1/completions", endpoints.completions)
    _post(app, "/v1/chat/completions", endpoints.chat_completions)


def _add_service(app: FastAPI, endpoints: ServiceEndpoints) -> None:
    _post(app, "/tokenize", endpoints.tokenize)
    _post(app, "/detokenize", endpoints.detokenize)
    _get(app, "/v1/models", endpoints.models)
    _get(app, "/v1/models/{model_id:path}", endpoints.model)
    # Scripts poll /health until a server can be used, so it reports readiness; /livez is for restart decisions.
    _get(app, "/health", endpoints.readyz)
    _get(app, "/readyz", endpoints.readyz)
    _get(app, "/livez", endpoints.livez)
    _get(app, "/metrics", endpoints.metrics)
    _get(app, "/version", endpoints.version)


def _post(app: FastAPI, path: str, endpoint: Callable[..., object]) -> None:
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        openapi_extra=openapi.request_body(path),
        responses=openapi.error_responses(),
        response_model=None,
    )


def _get(app: FastAPI, path: str, endpoint: Callable[..., object]) -> None:
    app.add_api_route(path, endpoint, methods=["GET"], responses=openapi.error_responses(), response_model=None)
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
