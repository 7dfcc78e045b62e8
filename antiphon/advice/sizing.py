"""`antiphon plan` and `antiphon doctor --sizing`: the memory that a model needs, and on which cards it fits.

    usual sets of cards     cards that suffice for models of three sizes
    a model's own table     memory for weights, KV cache and a step, estimated as the engine does
                            (`antiphon.services.engine.worker.estimate`), compared with the memory of the cards in
                            `CARDS`, of this machine's cards and of this machine

Nothing is loaded: only the model's small files are read.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.advice import device_checks
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.memory import free_bytes
from antiphon.services.engine.worker.estimate import CONTEXT_BYTES, BackendName, Needs, cpu_room, gpu_room, predict
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.world import world_size
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, converted, to_argv
from antiphon.shared.models.adapters import with_adapters
from antiphon.shared.models.image_models import processor_kwargs
from antiphon.shared.models.model_files import model_directory, model_name

if TYPE_CHECKING:
    from antiphon.services.vision.estimate import VisionNeeds

GIB, MIB = 1 << 30, 1 << 20
USUAL_CONTEXT = 4096
_MAX_CARDS = 8


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `memory_mib` as `nvidia-smi` reports it; `capability`: compute capability times ten, 0 if not known."""

    name: str
    memory_mib: int
    capability: int = 0

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return self.memory_mib * MIB


CARDS = (
    Card("A10", 23_028, 86),
    Card("L4", 23_034, 89),
    Card("RTX 3090", 24_576, 86),
    Card("RTX 4090", 24_564, 89),
    Card("V100 16G", 16_384, 70),
    Card("V100 32G", 32_768, 70),
    Card("A100 40G", 40_960, 80),
    Card("L20", 46_068, 89),
    Card("L40S", 46_068, 89),
    Card("A100 80G", 81_920, 80),
    Card("H100", 81_559, 90),
    Card("H200", 143_771, 90),
    Card("B200", 183_359, 100),
    Card("MI300X", 196_592),
)
"""Cards that are checked for a model in addition to those of this machine."""
SOURCE_TABLE = (
    ("6-8B", "L20 x1, A10 x1, A100 x1, V100 x1"),
    ("12-14B", "L20 x1, A10 x2, A100 x1, V100 x2"),
    ("65-72B", "L20 x8, A100 x8"),
)
"""Size of a model with 16-bit weights, and the sets of cards that suffice with a context of 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class Images:
    """The image services of a model, on `device` (`cpu` or `cuda`), and what each of them needs."""

    num: int
    device: str
    each: "VisionNeeds"

    def bytes_on(self, device: str) -> int:
        """Returns the bytes of all services in the memory of a device, `cpu` or `cuda`."""
        needs = self.each
        held = needs.weights + needs.step if self.device == device else 0
        if device == "cpu":
            return self.num * (held + needs.kept + (0 if held else needs.reading))
        return self.num * (held + CONTEXT_BYTES) if held else 0


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of an engine on cards of one kind, one card for each rank, or on this machine's CPU.

    `cache_bytes`: size of each rank's KV cache; `missing_bytes`: additional memory that each rank needs for one
    sequence of the longest context; `most_bytes`: largest possible cache.
    """

    needs: Needs
    cache_bytes: int
    missing_bytes: int
    most_bytes: int

    @property
    def fits(self) -> bool:
        """Whether a sequence of the longest context fits."""
        return self.missing_bytes <= 0

    def sequences(self, context: int) -> int:
        """Returns how many sequences of `context` tokens fit at once."""
        return self.cache_bytes // self.needs.cache_bytes(context)


def source_table() -> list[str]:
    """Returns the lines of the table of usual sets of cards."""
    head = "Cards that suffice, by the size of the model (16-bit weights; any one of those in a line):"
    return [head, *(f"  {size + ':':<8} {cards}" for size, cards in SOURCE_TABLE)]


def on_card(settings: EngineSettings, model_dir: Path, card: Card) -> Fit:
    """Returns the memory of an engine with these settings on cards of this kind, one for each rank."""
    if card.capability and card.capability < 80 and settings.execution.dtype == "auto":
        settings = replace(settings, dtype="float16")
    images = images_of(settings, model_dir)
    beside = images.bytes_on("cuda") if images else 0
    needs = replace(predict(settings, model_dir, "gpu"), beside_bytes=beside)
    cache = gpu_room(settings, needs, card.memory_bytes).asked_bytes
    usable = int(card.memory_bytes * settings.cache.gpu_memory_utilization)
    used = needs.weights_bytes + needs.adapters_bytes + CONTEXT_BYTES + needs.step_bytes
    wanted = used + needs.least_cache_bytes
    return Fit(needs, cache, max(wanted - usable, wanted + beside - card.memory_bytes), cache)


def on_cpu(settings: EngineSettings, model_dir: Path, backend: BackendName = "cpp") -> Fit:
    """Returns the memory of an engine with these settings on this machine's CPU."""
    images = images_of(settings, model_dir)
    beside = images.bytes_on("cpu") if images else 0
    needs = replace(predict(settings, model_dir, backend), beside_bytes=beside)
    room = cpu_room(settings, needs)
    missing = max(needs.main_memory_bytes - free_bytes(), needs.least_cache_bytes - room.asked_bytes)
    return Fit(needs, room.asked_bytes, missing, room.most_bytes)


def images_of(settings: EngineSettings, model_dir: Path) -> Images | None:
    """Returns what the image services of a model need; None without `--enable-mm`. Raises SettingsError."""
    if not settings.enable_mm:
        return None
    # Imported here because it imports transformers, which takes seconds.
    from antiphon.services.vision.estimate import vision_needs

    given = settings if isinstance(settings, ServeSettings) else ServeSettings()
    device = given.vision_device
    return Images(given.visions, device, vision_needs(model_dir, processor_kwargs(given.mm_processor_kwargs), device))


def cards_here() -> list[Card]:
    """Returns the NVIDIA GPUs of this machine, an entry for each kind; empty without a driver."""
    found = (Card(gpu.name, int(gpu.memory), _tenths(gpu.capability)) for gpu in device_checks.listed_gpus())
    return list(dict.fromkeys(found))


def chosen_card(name: str, memory_gb: float | None) -> Card | None:
    """Returns the card with this name; None for an empty name. Raises SettingsError for an unknown name."""
    if memory_gb is not None:
        if not memory_gb > 0 or not math.isfinite(memory_gb):
            raise SettingsError(f"--memory-gb: {memory_gb:g} is not above 0")
        return Card(name or f"{memory_gb:g} GiB", int(memory_gb * 1024))
    if not name:
        return None
    for card in (*CARDS, *cards_here()):
        if _same(card.name, name):
            return card
    near = [card.name for card in CARDS if _plain(name) and _plain(name) in _plain(card.name)]
    if len(near) == 1:
        return chosen_card(near[0], None)
    known = ", ".join(card.name for card in CARDS)
    raise SettingsError(f"--gpu: {name} is not one of {known}; give its memory with --memory-gb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a plan's table: cards of one kind, or this machine's CPU. `reason`: why there is no `fit`."""

    name: str
    memory_bytes: int
    fit: "Fit | None"
    reason: str = ""

    def as_json(self, contexts: Sequence[int]) -> dict[str, Any]:
        """Returns the row, with the number of sequences at once for each length of context."""
        fit = self.fit
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "fits": fit is not None and fit.fits,
            "missing_bytes": max(0, fit.missing_bytes) if fit else None,
            "sequences": {str(context): fit.sequences(context) for context in contexts} if fit else {},
            "reason": self.reason or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The memory of a model with its settings, where it fits, and the recommended command."""

    name: str
    needs: Needs
    rows: Sequence[Row]
    recommended: Sequence[str]
    lines: Sequence[str]

    @property
    def fits(self) -> bool:
        """Whether the model fits with these settings on one of the cards, or in this machine's memory."""
        return any(row.fit is not None and row.fit.fits for row in self.rows)

    @property
    def contexts(self) -> tuple[int, int]:
        """The lengths for which sequences are counted: a usual one, and the model's longest."""
        return min(self.needs.context, USUAL_CONTEXT), self.needs.context

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as an object for JSON."""
        needs = self.needs
        return {
            "model": self.name,
            "fits": self.fits,
            "parameters": needs.num_parameters,
            "dtype": _type(needs),
            "quantization": needs.form,
            "context": needs.context,
            "bytes": {
                "weights": needs.weights_bytes,
                "kv_cache_token": needs.token_bytes,
                "step": needs.step_bytes,
                "adapters": needs.adapters_bytes,
            },
            "places": [row.as_json(self.contexts) for row in self.rows],
            "recommendation": " ".join(line.strip() for line in self.recommended),
        }


def make_plan(settings: EngineSettings, card: Card | None = None) -> Plan:
    """Returns the plan for a card, or for all known cards and this machine.

    Raises SettingsError for an invalid model or setting.
    """
    directory, here = model_directory(settings, weights=False), cards_here()
    backend = _cpu_backend(settings)
    others = (each for each in CARDS if not any(_same(one.name, each.name) for one in here))
    targets = [card] if card else [*here, *others]
    try:
        first = predict(settings, directory, "gpu" if card or here else backend)
        rows = list(_rows(settings, directory, targets, backend, with_cpu=card is None))
        recommended = recommendation(settings, directory, card or (here[0] if here else None))
        name = model_name(settings)
        head = [*_summary(name, settings, first), *_images(settings, directory)]
    except ServiceError as error:
        raise SettingsError(error.message) from error
    lines = [*head, "", *_table(rows), "", *recommended]
    return Plan(name=name, needs=first, rows=rows, recommended=recommended, lines=lines)


def plan_lines(settings: EngineSettings, card: Card | None = None) -> Sequence[str]:
    """Returns the lines of a plan. Raises SettingsError for an invalid model or setting."""
    return make_plan(settings, card).lines


def recommendation(settings: EngineSettings, directory: Path, card: Card | None) -> list[str]:
    """Returns the flags with which the model fits on a card or, without a card, in this machine's memory.

    Quantization is recommended where memory is tight, and on a CPU for speed too.
    """
    where = f"{card.name}" if card else "this machine's memory"
    for changes in _attempts(settings, card):
        tried = replace(settings, **changes)
        fit = _tried(tried, directory, card)
        if fit and not card and fit.cache_bytes < fit.needs.least_cache_bytes <= fit.most_bytes:
            tried = replace(tried, kv_cache_memory_gb=_cache_gb(tried, fit))
            fit = _tried(tried, directory, card)
        if fit is None or not fit.fits:
            continue
        words = " ".join(filter(None, ["antiphon serve", settings.model, *_flags(tried)]))
        context = min(fit.needs.context, USUAL_CONTEXT)
        found = [f"Recommended for {where}: {words}"]
        found += [f"  {fit.sequences(context)} sequences of {context} tokens at once"]
        if changes.get("quantization") and not settings.execution.quantization:
            found += ["  Without quantization it does not fit; it costs little quality (docs/guides/quantize.md)."]
        elif not settings.execution.quantization and fit.needs.form == "none":
            mode = "ifq" if card else "ifq_w8a8"
            found += [f"  --quantization={mode} halves the weights: use it if memory is tight or speed matters."]
        return found
    return [
        f"The model does not fit into {where}, not with 4 bits per weight and a context of {USUAL_CONTEXT} tokens "
        "either: take a larger card or a smaller model."
    ]


def fit_check(settings: EngineSettings) -> device_checks.Check:
    """Returns the finding of `antiphon doctor` about a model: its memory needs, and whether it fits on this machine."""
    here = cards_here()
    try:
        directory = model_directory(settings, weights=False)
        fit = on_card(settings, directory, here[0]) if here else on_cpu(settings, directory, _cpu_backend(settings))
    except (ServiceError, SettingsError) as error:
        return device_checks.Check("warn", "model memory", f"not known: {_text(error)}")
    needs = fit.needs
    text = f"weights {_size(needs.weights_bytes)}, {_size(needs.token_bytes)} a token of the KV cache"
    context = min(needs.context, USUAL_CONTEXT)
    if fit.cache_bytes and fit.sequences(context):
        return device_checks.Check(
            "ok", "model memory", f"{text}; {fit.sequences(context)} sequences of {context} tokens"
        )
    advice = recommendation(settings, directory, here[0] if here else None)[0]
    return device_checks.Check("warn", "model memory", f"{text}: does not fit here", advice)


def _attempts(settings: EngineSettings, card: Card | None) -> Iterator[dict[str, Any]]:
    """Yields changed settings, the most recommended first."""
    sizes = [n for n in (1, 2, 4, _MAX_CARDS) if n > settings.parallel.tensor_parallel_size] if card else []
    online = ["ifq", "ifq_nf4"] if card else ["ifq_w8a8", "ifq_w4a8"]
    modes = [settings.execution.quantization] if settings.execution.quantization else ["", *online]
    contexts = [settings.scheduler.max_model_len] if settings.scheduler.max_model_len else [None, USUAL_CONTEXT]
    for size in (settings.parallel.tensor_parallel_size, *sizes):
        for mode in modes:
            for context in contexts:
                yield {"tensor_parallel_size": size, "quantization": mode, "max_model_len": context}


def _cache_gb(settings: EngineSettings, fit: Fit) -> float:
    """Returns a `--kv-cache-memory-gb` with which one sequence of the longest context fits."""
    needed = fit.needs.least_cache_bytes / settings.cache.gpu_memory_utilization
    return math.ceil(10 * needed / GIB) / 10


def _flags(settings: EngineSettings) -> list[str]:
    """Returns the flags of the engine that differ from the defaults, except flags of the model and the bus."""
    hidden = ("--model=", "--nats", "--advice-spelling")
    return [word for word in to_argv(converted(settings, EngineSettings)) if not word.startswith(hidden)]


def _tried(settings: EngineSettings, directory: Path, card: Card | None) -> Fit | None:
    """Returns the memory with these settings; None if the model does not support them."""
    try:
        return on_card(settings, directory, card) if card else on_cpu(settings, directory, _cpu_backend(settings))
    except (ServiceError, SettingsError):
        return None


def _summary(name: str, settings: EngineSettings, needs: Needs) -> Iterator[str]:
    d: DecoderDescription = needs.description
    form = "" if needs.form == "none" else f", weights {needs.form}"
    yield f"{name}: {needs.num_parameters / 1e9:.2f} B parameters, {_type(needs)}{form}, context {needs.context} tokens"
    ranks = world_size(settings.parallel)
    each = f", on each of {ranks} devices" if ranks > 1 else ""
    yield f"  weights    {_size(needs.weights_bytes)}{each}"
    yield (
        f"  KV cache   {_size(needs.token_bytes)} a token{each} ({len(d.attention_layers)} layers); "
        f"{_size(needs.cache_bytes(needs.context))} for one sequence of {needs.context} tokens"
    )
    if d.recurrent is not None:
        num = len(d.recurrent.layers)
        yield f"  states     {_size(needs.states_bytes)}{each} at most, of the {num} layers that do not attend"
    graphs = ", graphs included" if needs.graphs_bytes else ""
    yield f"  a step     {_size(needs.step_bytes)} at most (about; {settings.scheduler.max_num_seqs} sequences{graphs})"
    if needs.adapters_bytes:
        yield f"  adapters   {_size(needs.adapters_bytes)}{each} ({_adapters(settings)})"
    yield f"  sequences  {_size(needs.rows_bytes)} of main memory for their tokens"


def _images(settings: EngineSettings, directory: Path) -> Iterator[str]:
    if (found := images_of(settings, directory)) is not None:
        where = "main memory" if found.device == "cpu" else "the GPU"
        each = f" in each of {found.num} image services" if found.num > 1 else ""
        needs = found.each
        yield (
            f"  images   {_size(needs.weights)} of {where} for the vision encoder and {_size(needs.step)} for its "
            f"largest image{each} (about)"
        )
        reading = "" if found.device == "cpu" else f"{_size(needs.reading)} of main memory to read an image, "
        yield f"             {reading}{_size(needs.kept)} of main memory at most for embeddings that are kept"


def _adapters(settings: EngineSettings) -> str:
    """Returns, as text, the number and size of the adapters for which memory is reserved."""
    full = with_adapters(settings).adapters
    kinds: list[str] = []
    if full.enable_lora:
        kept = full.max_cpu_loras or full.max_loras
        kinds.append(f"{full.max_loras} LoRA at once, {kept} kept in main memory, rank {full.max_lora_rank}")
    if full.enable_prompt_adapter:
        kinds.append(f"{full.max_prompt_adapters} prompt adapters of {full.max_prompt_adapter_token} tokens")
    return "; ".join(kinds)


def _rows(
    settings: EngineSettings, directory: Path, cards: Sequence[Card], backend: BackendName, *, with_cpu: bool
) -> Iterator[Row]:
    if with_cpu:
        fit, reason = _fit_or_reason(settings, directory, None, backend)
        yield Row(name="CPU, here", memory_bytes=free_bytes(), fit=fit, reason=reason)
    for card in cards:
        many = world_size(settings.parallel)
        fit, reason = _fit_or_reason(settings, directory, card, backend)
        name = card.name if many == 1 else f"{card.name} x{many}"
        yield Row(name=name, memory_bytes=card.memory_bytes, fit=fit, reason=reason)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    context = next((row.fit.needs.context for row in rows if row.fit), USUAL_CONTEXT)
    usual = min(context, USUAL_CONTEXT)
    yield f"{'':<14} {'memory':>10}   fits   sequences at once of {usual} / {context} tokens"
    for row in rows:
        fit, memory = row.fit, f"{row.memory_bytes / GIB:>6.1f} GiB"
        if fit is None:
            yield f"{row.name:<14} {memory}   no     {row.reason}"
        elif fit.fits:
            yield f"{row.name:<14} {memory}   yes    {fit.sequences(usual)} / {fit.sequences(context)}"
        else:
            shorter = f", {fit.sequences(usual)} of {usual} tokens fit" if fit.sequences(usual) else ""
            yield f"{row.name:<14} {memory}   no     {_size(fit.missing_bytes)} missing{shorter}"


def _fit_or_reason(
    settings: EngineSettings, directory: Path, card: Card | None, backend: BackendName
) -> tuple[Fit | None, str]:
    try:
        return (on_card(settings, directory, card) if card else on_cpu(settings, directory, backend)), ""
    except (ServiceError, SettingsError) as error:
        return None, _text(error)


def _cpu_backend(settings: EngineSettings) -> BackendName:
    return "cpp" if settings.execution.cpu_backend == "auto" else "torch"


def _type(needs: Needs) -> str:
    return str(needs.dtype).removeprefix("torch.")


def _size(size: float) -> str:
    """Returns bytes in the largest unit in which they are at least 1."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1024:.1f} KiB"


def _text(error: ServiceError | SettingsError) -> str:
    return error.message if isinstance(error, ServiceError) else str(error)


def _tenths(capability: str) -> int:
    words = capability.replace(".", "")
    return int(words) if words.isdecimal() else 0


def _same(name: str, asked: str) -> bool:
    """Whether two names mean the same card: `A100 80G`, `a100-80g`, `NVIDIA L20`."""
    return _plain(name) == _plain(asked)


def _plain(name: str) -> str:
    word = name.lower().replace("nvidia", "").replace("geforce", "").replace("gb", "g")
    return "".join(char for char in word if char.isalnum())
