"""The rows of the tables of models, computed from the registry, the lists of model types, and the tests' examples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from antiphon.services.engine.backends.torch.own_cache.kinds import OWN_CACHE_TYPES, keeps_own_cache
from antiphon.services.engine.backends.torch.whole_text.kinds import CLASSIFIER, CLASSIFIERS, ENCODERS
from antiphon.services.engine.models.about import About, about
from antiphon.services.engine.models.registry import FAMILIES, has_family
from infra.checks.models import examples
from infra.checks.models.examples import BACKENDS, Example
from infra.checks.models.facts import COLUMNS, NONE, Facts, facts, joined

HEAD = ("models", "architectures", *COLUMNS, "tools", "reasoning", "measured", "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Architectures about which the same is said."""

    about: About
    architectures: tuple[str, ...]
    facts: Facts
    measured: str

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of `HEAD`."""
        names = ", ".join(f"`{name}`" for name in self.architectures)
        tools, reasoning = (
            ", ".join(f"`{name}`" for name in formats) or NONE for formats in (self.about.tools, self.about.reasoning)
        )
        return (
            self.about.models or NONE,
            names,
            *self.facts.cells,
            tools,
            reasoning,
            self.measured,
            self.about.limits or NONE,
        )


def family_rows() -> list[Row]:
    """Returns the rows of the families, sorted by name. Raises ValueError for a family that no test has a model of."""
    known: dict[str, list[Example]] = {}
    # A comparison with transformers' own cache says nothing about a family that the type has got since.
    others = (replace(one, backends=frozenset()) for one in examples.own_caches())
    for example in (*examples.decoders(), *others):
        if has_family(example.config):
            known.setdefault(example.architecture, []).append(example)
    rows: dict[tuple[int, About, Facts], list[str]] = {}
    for number, family in enumerate(FAMILIES):
        siblings = [one for name in family.ARCHITECTURES for one in known.get(name, ())]
        if not siblings:
            raise ValueError(f"no test has a model of {family.ARCHITECTURES[0]}: add one to tests/model_variants.py")
        for name in family.ARCHITECTURES:
            own = known.get(name) or [_renamed(one, name) for one in siblings]
            found = joined({facts(one.config) for one in own})
            rows.setdefault((number, about(family, name), found), []).append(name)
    made = (
        Row(about=said, architectures=tuple(names), facts=found, measured=_measured(names, known))
        for (_, said, found), names in rows.items()
    )
    return sorted(made, key=lambda row: row.about.models.casefold())


def foreign_row() -> Row:
    """Returns the row of the models that run through transformers with the engine's cache."""
    compared = tuple(examples.foreign())
    names = tuple(sorted({one.architecture for one in compared}))
    return replace(_row(About(), compared, ""), architectures=names)


def own_cache_rows() -> list[Row]:
    """Returns the rows of the models that run with transformers' own cache."""
    compared = {one.config["model_type"]: one for one in examples.own_caches()}
    rows: list[Row] = []
    for kind, said in OWN_CACHE_TYPES.items():
        name = examples.architecture_of(kind)
        example = compared.get(kind) or Example(config={"model_type": kind, "architectures": [name]})
        if keeps_own_cache(example.config):
            rows.append(_row(said, (example,), name))
    return sorted(rows, key=lambda row: row.about.models.casefold())


def whole_text_rows() -> list[Row]:
    """Returns the rows of encoders and of models with a classification head."""
    rows = [_row(ENCODERS[one.config["model_type"]], (one,), one.architecture) for one in examples.encoders()]
    return [*rows, _row(CLASSIFIERS, tuple(examples.classifiers()), f"…{CLASSIFIER}")]


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yields the lines of a table, without the columns in which no row says anything."""
    cells = [row.cells() for row in rows]
    kept = [index for index in range(len(HEAD)) if any(row[index] != NONE for row in cells)]
    yield _line(HEAD[index] for index in kept)
    yield "|" + "---|" * len(kept)
    for row in cells:
        yield _line(row[index] for index in kept)


def left_out(rows: Iterable[Row]) -> list[str]:
    """Returns the columns in which no row says anything."""
    cells = [row.cells() for row in rows]
    return [name for index, name in enumerate(HEAD) if all(row[index] == NONE for row in cells)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(said: About, compared: tuple[Example, ...], name: str) -> Row:
    found = joined({facts(one.config) for one in compared})
    measured = {backend for one in compared for backend in one.backends}
    return Row(about=said, architectures=(name,), facts=found, measured=_listed(measured) or NONE)


def _renamed(example: Example, name: str) -> Example:
    """Returns an example of another architecture of the same family, with its type if transformers has one."""
    kind = next((kind for kind, one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if one == name), None)
    return Example(config={**example.config, "architectures": [name], **({"model_type": kind} if kind else {})})


def _measured(names: list[str], known: dict[str, list[Example]]) -> str:
    """Returns the backends of the comparisons of these architectures, and names those without a comparison."""
    compared = [one for name in names for one in known.get(name, ()) if one.backends]
    if not compared:
        return NONE
    text = _listed({backend for one in compared for backend in one.backends})
    plain = " ¹" if any(one.plain for one in compared) else ""
    found = {one.architecture for one in compared}
    missing = ", ".join(f"`{name}`" for name in names if name not in found)
    return f"{text}{plain}{f', not {missing}' if missing else ''}"


def _listed(backends: set[str]) -> str:
    return ", ".join(name for key, name in BACKENDS.items() if key in backends)
