"""Everything that happens in one run of the swarm, drawn from its seed: members, load and faults, as data.

`draw_plan` is a pure function. A plan can be cut down (`shrink`) and run again, and prints as text.
"""

import random
from dataclasses import dataclass, field, replace

import msgspec

from antiphon.services.gateway.path.generation import (
    Client,
    GenerationRequest,
    ModelCard,
    Origin,
    OutputText,
    PromptInputs,
)
from antiphon.shared.parameters.pooling import PoolingParams
from antiphon.shared.parameters.sampling import BeamParams, SamplingParams
from antiphon.shared.request.choices import choice_params
from tests.sim.model import HashModel, Reference, beam_references, pooled_reference, reference

LOAD_S = 4.0
"""Requests arrive within this time."""
FAULTS_S = 5.0
"""Faults begin within this time."""
CALM_S = 13.0
"""By now every fault is over and every member runs."""
MAX_MODEL_LEN = 128
NUM_MODELS = 2
"""How many models one bus carries."""
WORDS = ("one", "two", "tree", "of", "many", "river", "a", "stone", "under", "light")
PATTERNS = (
    "antiphon.v3.>",
    "antiphon.v3.hb.>",
    "antiphon.v3.inbox.>",
    "antiphon.v3.tok.>",
    "antiphon.v3.eng.*.*.ctl",
    "antiphon.v3.det.*.*.ctl",
    "antiphon.v3.det.*.*.tok",
    "antiphon.v3.gw.*.*.txt",
    "antiphon.v3.gw.*.*.tok",
)
SMALL_MESSAGES = {
    "BUS_PAYLOAD_BYTES": 1200,
    "STREAM_EVENT_TOKENS_MAX": 4,
    "TOKENIZE_CHARS_MAX": 100,
    "PROMPT_LOGPROBS_TOKENS_MAX": 4,
}
SMALL_BUFFERS = {"OUTBOUND_BYTES_MAX": 1500, "PROMPT_LOGPROBS_TOKENS_MAX": 4}
KINDS = ("kill", "freeze", "cut", "outage", "drop", "duplicate", "delay", "slow", "drain")
WEIGHTS = (4, 4, 3, 1, 4, 2, 3, 2, 2)


@dataclass(frozen=True)
class Place:
    """One member that the society has."""

    kind: str
    name: str
    model: int = 0


@dataclass(frozen=True)
class Fault:
    """One fault. `seconds`: how long it lasts; after a kill or a drain, until the member is started again."""

    at_s: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    pattern: str = ""
    sender: str = ""
    receiver: str = ""
    probability: float = 1.0
    delay_s: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        what = f"{self.at_s:6.3f} s  {self.kind} {self.target}".rstrip()
        if self.pattern:
            pair = f" from {self.sender or 'any'} to {self.receiver or 'any'}"
            amount = f" by {self.delay_s[0]:.2f}-{self.delay_s[1]:.2f} s" if self.kind == "delay" else ""
            chance = f" with {self.probability:.2f}" if self.kind != "delay" else ""
            what += f" {self.pattern}{pair}{chance}{amount}"
        return f"{what} for {self.seconds:.2f} s"


CLIENTS = (Client(), Client("a"), Client("b", 2.0), Client("c", 1.0, -1))


@dataclass(frozen=True)
class Load:
    """One client's request."""

    number: int
    at_s: float
    gateway: int
    model: int
    prompts: tuple[str, ...]
    params: SamplingParams
    n: int = 1
    as_tokens: bool = False
    stop: str = ""
    include_stop: bool = False
    cache_salt: bytes = b""
    priority: int = 0
    cancel_after_s: float | None = None
    pooling: PoolingParams | None = None

    def request(self, attempt: int, model_name: str) -> GenerationRequest:
        """What the gateway is asked."""
        texts, token_ids = self.prompts, tuple(tuple(prompt.encode()) for prompt in self.prompts)
        return GenerationRequest(
            request_id=f"r{self.number}" + f"x{attempt}" * (attempt > 0),
            model=model_name,
            params=self.params,
            inputs=PromptInputs(texts=() if self.as_tokens else texts, token_ids=token_ids if self.as_tokens else ()),
            n=self.n,
            output=OutputText(stop=(self.stop,) if self.stop else (), include_stop_str_in_output=self.include_stop),
            cache_salt=self.cache_salt,
            priority=self.priority,
            origin=Origin(client=CLIENTS[self.number % len(CLIENTS)]),
            pooling=self.pooling,
        )

    def references(self, model: HashModel) -> list[Reference]:
        """What each sequence gives when nothing fails."""
        if self.pooling is not None:
            kind = self.pooling.kind or "mean"
            return [pooled_reference(model, list(prompt.encode()), kind) for prompt in self.prompts]
        card = ModelCard(name="", path="", max_model_len=MAX_MODEL_LEN, vocab_size=256, created=0)
        found = []
        for prompt in self.prompts:
            tokens = list(prompt.encode())
            if self.params.beam is not None:
                found += beam_references(model, tokens, self.params.beam.width, self.params.max_tokens)[: self.n]
                continue
            for choice in range(self.n):
                params = choice_params(self.params, choice).within(card.max_model_len - len(tokens))
                salt = params.seed if params.temperature else 0
                most = min(params.max_tokens, MAX_MODEL_LEN - len(tokens))
                found.append(reference(model, tokens, salt, most, self.stop, self.include_stop))
        return found

    def __str__(self) -> str:
        sizes = [len(prompt) for prompt in self.prompts]
        extra = f" beams={self.params.beam}" * (self.params.beam is not None)
        extra += f" prompt logprobs={self.params.prompt_logprobs}" * (self.params.prompt_logprobs is not None)
        extra += f" n={self.n}" * (self.n > 1) + f" stop={self.stop!r}" * bool(self.stop)
        extra += f" {self.pooling}" * (self.pooling is not None)
        if self.cancel_after_s is not None:
            extra += f" cancel after {self.cancel_after_s:.2f} s"
        where = f"{self.at_s:6.3f} s  r{self.number} at gateway{self.gateway}"
        return f"{where}, prompts {sizes}, {self.params.max_tokens} tokens{extra}"


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    members: tuple[Place, ...]
    models: tuple[HashModel, ...]
    flags: dict[str, object] = field(default_factory=dict)
    """Settings of the engines."""
    worker: dict[str, object] = field(default_factory=dict)
    """Options of the workers."""
    delay_s: tuple[float, float] = (0.0001, 0.002)
    step_s: float = 0.01
    bounds: dict[str, int] = field(default_factory=dict)
    """Lower values for some of `antiphon.shared.limits`, so that a small load reaches them."""
    loads: tuple[Load, ...] = ()
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"members: {' '.join(member.name for member in self.members)}; models: {self.models}",
            f"engines: {self.flags} {self.worker}, {1000 * self.step_s:g} ms a step; messages take {self.delay_s} s"
            + (f"; {self.bounds}" if self.bounds else ""),
            "requests:",
            *(f"  {load}" for load in self.loads),
            "faults:",
            *(f"  {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(f"plan {seed}")
    models = tuple(HashModel(f"m{i}", draw.random() < 0.5, draw.choice([0, 0, 4])) for i in range(NUM_MODELS))
    members = _draw_members(draw)
    worker: dict[str, object] = {
        "num_blocks": draw.choice([34, 48, 64, 128]),
        "max_model_len": MAX_MODEL_LEN,
        "num_host_blocks": draw.choice([0, 0, 16]),
        "pipelined": draw.random() < 0.4,
    }
    max_num_seqs = draw.choice([2, 4, 8, 16])
    flags: dict[str, object] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw.choice([16, 32, 64]),
        "enable_prefix_caching": draw.random() < 0.8,
        "num_scheduler_steps": draw.choice([1, 1, 1, 3]),
    }
    plan = Plan(
        seed,
        members,
        models,
        flags,
        worker,
        draw.choice([(0.0001, 0.002), (0.0001, 0.002), (0.0, 0.0), (0.001, 0.03)]),
        draw.choice([0.01, 0.02, 0.04, 0.06]),
        (SMALL_MESSAGES if draw.random() < 0.2 else {}) | (SMALL_BUFFERS if draw.random() < 0.1 else {}),
    )
    gateways = sum(member.kind == "gateway" for member in members)
    count = draw.choice([2, 6, 12, 20])
    loads = tuple(_draw_load(draw, number, gateways, models) for number in range(count))
    # Drawn apart, so that the rest of a seed's plan stays what it was.
    loads = tuple(_draw_more(random.Random(f"more {seed}/{load.number}"), load, max_num_seqs) for load in loads)
    faults = _draw_faults(draw, members)
    return replace(plan, loads=tuple(sorted(loads, key=lambda load: load.at_s)), faults=faults)


def _draw_members(draw: random.Random) -> tuple[Place, ...]:
    counts = {"gateway": draw.choice([1, 1, 2, 3])}
    places = [Place("gateway", f"gateway{i}") for i in range(counts["gateway"])]
    for kind, most in (("tokenizer", 2), ("detokenizer", 3), ("engine", 3)):
        number = 0
        for model in range(NUM_MODELS):
            for _ in range(draw.randint(1, most)):
                places.append(Place(kind, f"{kind}{number}", model))
                number += 1
    return tuple(places)


def _draw_load(draw: random.Random, number: int, gateways: int, models: tuple[HashModel, ...]) -> Load:
    n = draw.choice([1, 1, 1, 2, 3])
    prompts = tuple(_draw_prompt(draw) for _ in range(draw.choice([1, 1, 1, 1, 2])))
    params = SamplingParams(
        max_tokens=draw.choice([1, 8, 20, 40, 66]),
        temperature=draw.choice([0.0, 1.0]),
        seed=draw.randrange(1000),
        logprobs=draw.choice([None, None, 2]),
    )
    model = draw.randrange(len(models))
    load = Load(
        number,
        draw.uniform(0.0, LOAD_S) * draw.choice([0.1, 1.0, 1.0]),
        draw.randrange(gateways),
        model,
        prompts,
        params,
        n,
        draw.random() < 0.2,
        cache_salt=draw.choice([b"", b"", b"", b"salt"]),
        priority=draw.choice([0, 0, 0, 1]),
        cancel_after_s=draw.uniform(0.0, 1.5) if draw.random() < 0.2 else None,
    )
    if draw.random() < 0.2:
        pooling = PoolingParams(kind=draw.choice([None, "last", "mean", "cls"]))
        return replace(load, n=1, prompts=prompts * draw.choice([1, 4]), pooling=pooling)
    text = load.references(models[model])[0].text
    if draw.random() < 0.3 and len(text) > 2:
        start = draw.randrange(len(text) - 1)
        stop = text[start : start + draw.choice([1, 2, 4])]
        if "\ufffd" not in stop:
            load = replace(load, stop=stop, include_stop=draw.random() < 0.3)
    return load


def _draw_more(draw: random.Random, load: Load, max_num_seqs: int) -> Load:
    """The load, or in its place a beam search or one that asks for log probabilities of its prompts."""
    kind = draw.choice(["", "", "", "", "beams", "prompt"])
    if load.pooling is not None:
        return load
    if kind == "prompt":
        params = msgspec.structs.replace(load.params, prompt_logprobs=draw.choice([0, 1]))
        return replace(load, params=params)
    if kind == "beams" and not load.stop:
        beam = BeamParams(draw.choice([2, min(3, max_num_seqs)]))
        params = msgspec.structs.replace(load.params, temperature=0.0, max_tokens=draw.choice([1, 4, 8]), beam=beam)
        return replace(load, params=params, n=2)
    return load


def _draw_prompt(draw: random.Random) -> str:
    common = draw.choice(["", "the same beginning of many prompts: "])
    words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 6)))
    return (common + words)[:60]


def _draw_faults(draw: random.Random, members: tuple[Place, ...]) -> tuple[Fault, ...]:
    count = draw.choice([0, 1, 2, 4, 8, 12, 20])
    enabled = draw.sample(KINDS, k=draw.randint(1, len(KINDS)))
    weights = [WEIGHTS[KINDS.index(kind)] for kind in enabled]
    faults = [_draw_fault(draw, draw.choices(enabled, weights)[0], members) for _ in range(count)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw_fault(draw: random.Random, kind: str, members: tuple[Place, ...]) -> Fault:
    at_s = draw.uniform(0.0, FAULTS_S)
    seconds = min(draw.choice([0.05, 0.3, 0.8, 1.5, 3.0, 6.0]) * draw.uniform(0.5, 1.5), CALM_S - at_s - 0.5)
    if kind in ("drop", "duplicate", "delay"):
        one, two = (draw.choice([place.name for place in members]) if draw.random() < 0.4 else "" for _ in range(2))
        low_s = draw.choice([0.0, 0.01, 0.2])
        return Fault(
            at_s, kind, "", seconds, draw.choice(PATTERNS), one, two, draw.choice([0.05, 0.3, 1.0]),
            (low_s, low_s + draw.choice([0.02, 0.2, 1.0])),
        )  # fmt: skip
    if kind == "outage":
        return Fault(at_s, kind, "", seconds)
    if kind == "slow":
        engines = [place.name for place in members if place.kind == "engine"]
        return Fault(at_s, kind, draw.choice(engines), seconds, delay_s=(0.0, draw.choice([0.1, 0.4, 1.0])))
    # A gateway's end costs its clients their requests, so it is drawn more rarely.
    rare = kind in ("kill", "drain") and draw.random() < 0.7
    names = [place.name for place in members if not (rare and place.kind == "gateway")]
    return Fault(at_s, kind, draw.choice(names), seconds)
