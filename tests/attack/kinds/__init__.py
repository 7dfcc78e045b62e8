"""The attacks, by what they attack. `ATTACKS` has them all, those on one kind of server together."""

from tests.attack.attack import Attack
from tests.attack.kinds import bodies, browser, bus, computing, connections, files, fuzz, images, keys, stores

_ALL = (
    *(*bodies.ATTACKS, *computing.ATTACKS, *files.ATTACKS, *stores.ATTACKS, *bus.ATTACKS, *fuzz.ATTACKS),
    *(*browser.ATTACKS, *connections.ATTACKS, *images.ATTACKS, *keys.ATTACKS),
)
ATTACKS: tuple[Attack, ...] = tuple(sorted(_ALL, key=lambda one: [each.server for each in _ALL].index(one.server)))
