"""An attack by the owner of a key that remains when another one is taken from `--api-keys`."""

import random
import tempfile
from pathlib import Path

from tests.attack.attack import OWN, Attack
from tests.attack.judging import FIGURES_ONLY, Told
from tests.attack.place import Place
from tests.system.served import Served

FIRST, SECOND = "sk-first-aaaaaaaa", "sk-second-bbbbbbbb"


def removed(place: Place, rng: random.Random) -> Told:
    """Two keys; the first makes a file and a response; it is removed, and the second asks for them."""
    told = Told()
    with tempfile.TemporaryDirectory() as folder:
        kept = (f"--files-directory={Path(folder) / 'files'}", f"--bus-directory={Path(folder) / 'bus'}")
        flags = (*kept, "--stream-store=file")
        server = Served(f"--api-keys={FIRST},{SECOND}", *flags)
        try:
            server.wait_for("Antiphon is ready")
            at = Place(server.port, server.process.pid, folder, place.seed, place.seconds)
            file_id = at.upload(b"secret", key=FIRST).json["id"]
            body = {"model": at.model, "input": "secret", "max_output_tokens": 16}
            response = at.ask("POST", "/v1/responses", body, key=FIRST).json["id"]
        finally:
            server.stop()
        server = Served(f"--api-keys={SECOND}", *flags)
        try:
            server.wait_for("Antiphon is ready")
            at = Place(server.port, server.process.pid, folder, place.seed, place.seconds)
            paths = (f"/v1/files/{file_id}/content", f"/v1/files/{file_id}", f"/v1/responses/{response}")
            statuses = {
                path.rpartition("/v1/")[2].partition("/")[0]: at.ask("GET", path, key=SECOND).status for path in paths
            }
            listed = len(at.ask("GET", "/v1/files", key=SECOND).json.get("data", ()))
        finally:
            server.stop()
    told.figures |= {"statuses": statuses, "listed_files": listed}
    if set(statuses.values()) != {404} or listed:
        told.broken.append(f"the second key reads what the first one made: {statuses}, {listed} files listed")
    return told


ATTACKS = (
    Attack(
        "removed-key", "the key behind one that is removed from --api-keys", "the other key", removed,
        "it does not get the files and responses of the first", server=OWN, seconds=120.0, goal=FIGURES_ONLY,
    ),
)  # fmt: skip
