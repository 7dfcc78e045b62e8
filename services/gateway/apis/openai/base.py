"""What an API is to the application: its routes, and the form of its errors."""

from collections.abc import Mapping

from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.errors import ErrorFormat
from antiphon.services.gateway.edge.http.routing.openapi import ErrorSchema
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.path.guest import Lifetime


class Api(Lifetime):
    """One API, a folder in `antiphon.services.gateway.apis`, or the routes of a guest, in its folder.

    The class attributes are keyed by the beginning of paths.
    """

    order = 1
    """Routes are tried in their order: those of APIs with a lower number first."""
    always = False
    """Whether the API is there also with `--use-openai=false`."""
    error_formats: Mapping[str, ErrorFormat] = {}
    """How error objects are encoded, where it is not OpenAI's form."""
    error_schemas: Mapping[str, ErrorSchema] = {}
    """The schemas of those error objects."""
    streaming: tuple[str, ...] = ()
    """Routes whose answers are streams unless the body's `stream` is false."""

    def add(self, routes: Routes, serving: Serving) -> None:
        """Adds the routes."""
        raise NotImplementedError
