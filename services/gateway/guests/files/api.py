"""The API of files: upload, list, retrieve, download, delete."""

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.listing import check_query, page
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.edge.http.routing.routes import JsonLines, Routes
from antiphon.services.gateway.guests.files.multipart import FormParser, Part
from antiphon.services.gateway.guests.files.store import FileStore
from antiphon.services.gateway.guests.files.writer import FileWriter
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits
from antiphon.shared.request.checks import missing, refuse, unsupported

LIST_MAX = 10_000
"""Maximum number of files in one page, as in OpenAI's API."""
_PURPOSES = ("batch", "vision", "user_data")
"""Purposes of uploaded files: the input of batches, and images that requests name by the file's id."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


class TheApi(Api):
    """See Api."""

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api. Offers the files to the other guests."""
        self._store = FileStore(serving.settings.files_directory)
        serving.guests.offer(self._store)
        routes.post("/v1/files", self.upload)
        routes.get("/v1/files", self.list)
        routes.get("/v1/files/{file_id}", self.retrieve)
        routes.get("/v1/files/{file_id}/content", self.content, JsonLines)
        routes.delete("/v1/files/{file_id}", self.delete)

    async def upload(self, request: Request) -> Response:
        """Stores a file that is sent as a form with the fields `file` and `purpose`."""
        form = FormParser(request.headers.get("content-type", ""))
        announced = request.headers.get("content-length", "")
        writer = await self._store.create(int(announced) if announced.isdecimal() else 0)
        try:
            fields, filename = await _read_form(request, form, writer)
            stored = await writer.commit(filename, _purpose(fields), _ttl_s(fields))
            return json_response(stored.to_object())
        except BaseException:
            await writer.abort()
            raise

    async def list(
        self,
        request: Request,
        purpose: str | None = None,
        limit: int = LIST_MAX,
        order: str = "desc",
        after: str | None = None,
    ) -> Response:
        """Lists the files, the newest first."""
        check_query(request, ("purpose", "limit", "order", "after"))
        files = [one for one in await self._store.all() if purpose in (None, one.purpose)]
        objects = [one.to_object() for one in files]
        return json_response(page(objects, limit=limit, order=order, after=after, most=LIST_MAX))

    async def retrieve(self, file_id: str) -> Response:
        """Answers with the description of a file."""
        return json_response((await self._store.get(file_id)).to_object())

    async def content(self, file_id: str) -> Response:
        """Answers with the data of a file."""
        found = await self._store.get(file_id)
        kind = "application/octet-stream" if found.purpose in _PURPOSES[1:] else "application/jsonl"
        return FileResponse(self._store.path(file_id), media_type=kind, filename=found.filename)

    async def delete(self, file_id: str) -> Response:
        """Removes a file. A batch that reads it fails."""
        await self._store.delete(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


async def _read_form(request: Request, form: FormParser, writer: FileWriter) -> tuple[dict[str, str], str]:
    """Writes the form's file to `writer`. Returns the other fields and the name of the file. Raises ServiceError."""
    fields: dict[str, str] = {}
    filename: str | None = None
    current: Part | None = None
    async for piece in request_body.pieces(request.scope["headers"], request.receive, file_limits.UPLOAD_BYTES_MAX):
        for event in form.feed(piece):
            if isinstance(event, Part):
                current = event
                if event.name == "file" and filename is None:
                    filename = _filename(event)
                else:
                    _begin_field(fields, event.name)
            elif current is not None and current.name == "file":
                await writer.write(event)
            elif current is not None:
                _extend_field(fields, current.name, event)
    form.end()
    if filename is None:
        missing("file")
    return fields, filename


def _filename(part: Part) -> str:
    if part.filename is None:
        refuse("file", "must be sent as a file, with a file name")
    # Its description must be text that can be encoded.
    name = part.filename.encode("utf-8", "replace").decode()
    return name[-file_limits.FILE_NAME_CHARS_MAX :] or "file"


def _begin_field(fields: dict[str, str], name: str) -> None:
    if name in fields or name == "file":
        refuse(name, "is given twice")
    if name not in _FIELDS:
        shown = name[: limits.FIELD_NAME_CHARS_MAX]
        raise ServiceError("unsupported_parameter", f"Unrecognized request argument supplied: '{shown}'.", param=shown)
    fields[name] = ""


def _extend_field(fields: dict[str, str], name: str, data: bytes) -> None:
    fields[name] += data.decode("utf-8", "replace")
    if len(fields[name]) > file_limits.FORM_FIELD_CHARS_MAX:
        refuse(name, f"must have at most {file_limits.FORM_FIELD_CHARS_MAX} characters")


def _purpose(fields: dict[str, str]) -> str:
    if "purpose" not in fields:
        missing("purpose")
    if fields["purpose"] not in _PURPOSES:
        unsupported("purpose", f"A 'purpose' other than {', '.join(map(repr, _PURPOSES))} is")
    return fields["purpose"]


def _ttl_s(fields: dict[str, str]) -> int:
    if _ANCHOR not in fields and _SECONDS not in fields:
        return file_limits.FILE_TTL_S
    if fields.get(_ANCHOR) != "created_at":
        refuse(_ANCHOR, "must be 'created_at'")
    least, most, seconds = file_limits.FILE_TTL_MIN_S, file_limits.FILE_TTL_S, fields.get(_SECONDS, "")
    if not (seconds.isascii() and seconds.isdecimal() and least <= int(seconds) <= most):
        refuse(_SECONDS, f"must be between {least} and {most}")
    return int(seconds)
