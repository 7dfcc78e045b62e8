"""Attacks by a web page that a user opens, on a server without keys: requests across sites, names that are rebound."""

import random
from collections.abc import Iterator

from tests.attack.attack import PAGE, Attack
from tests.attack.judging import FIGURES_ONLY, Told
from tests.attack.place import FORM, Place, form

EVIL = "http://evil.example"
TEXT = {"Content-Type": "text/plain;charset=UTF-8"}
"""A type that a page may send to another site without asking first."""
FOREIGN = (
    {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"},
    {"Origin": EVIL},  # a browser that does not send Sec-Fetch-Site
    {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
)
COMPLETION = b'{"prompt":"x","max_tokens":2}'


def cross_site(place: Place, rng: random.Random) -> Told:
    """Requests with effect from a page of another site; none may be done."""
    told = Told()
    engine = next(
        (
            one["id"]
            for one in place.ask("GET", "/admin/topology").json.get("members", ())
            if one["service"] == "engine"
        ),
        "engine-1",
    )
    wanted = {
        "generate": ("/v1/completions", COMPLETION),
        "drain": (f"/admin/engines/{engine}/drain", b'{"force":true}'),
        "a model": ("/admin/models", b'{"model":"antiphon-demo","directory":"/nonexistent"}'),
        "an adapter": ("/v1/load_lora_adapter", b'{"lora_name":"e","lora_path":"/etc"}'),
        "a batch": (
            "/v1/batches",
            b'{"input_file_id":"file-x","endpoint":"/v1/completions","completion_window":"24h"}',
        ),
    }
    done = [
        f"{name} ({answer})"
        for headers in FOREIGN
        for name, (path, body) in wanted.items()
        if (answer := place.ask("POST", path, body, headers={**TEXT, **headers}).status) != 403
    ]
    for headers in FOREIGN:
        answer = place.ask("POST", "/v1/files", form(b"{}\n"), headers={"Content-Type": FORM, **headers}).status
        done += [f"an upload ({answer})"] if answer != 403 else []
    place.ask("POST", f"/admin/engines/{engine}/resume", {})
    told.figures["not_refused"] = len(done)
    if done:
        told.broken.append(f"not answered with 403: {', '.join(sorted(set(done)))}")
    told.broken += _own_page(place)
    return told


def rebinding(place: Place, rng: random.Random) -> Told:
    """A name of the attacker's, rebound to this machine: the page is then of the same origin and reads answers."""
    told = Told()
    host = f"evil.example:{place.port}"
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    paths = ("/v1/requests?all=true", "/admin/topology", "/v1/files", "/v1/models", "/metrics", "/")
    done = [path for path in paths if place.ask("GET", path, headers=headers).status != 403]
    if place.ask("POST", "/v1/completions", COMPLETION, headers=headers).status != 403:
        done.append("/v1/completions")
    told.figures["not_refused"] = len(done)
    if done:
        told.broken.append(f"not answered with 403: {', '.join(done)}")
    told.broken += _own_page(place)
    return told


def _own_page(place: Place) -> Iterator[str]:
    """What must go on to work: programs, and the server's own pages, by any name of this machine."""
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{place.port}"
        for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}):
            status = place.ask("POST", "/v1/completions", COMPLETION, headers=headers).status
            if status != 200:
                yield f"a request of the server's own page at {name} was answered with {status}"


ATTACKS = (
    Attack(
        "cross-site", "requests of a page of another site", PAGE, cross_site, "each gets 403; the own pages work",
        server="open", goal=FIGURES_ONLY,
    ),
    Attack(
        "rebinding", "requests with the name of the attacker's site as host", PAGE, rebinding,
        "each gets 403; the own pages work", server="open", goal=FIGURES_ONLY,
    ),
)  # fmt: skip
