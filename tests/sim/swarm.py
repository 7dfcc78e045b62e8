"""One run of a plan: the society is started, loaded, broken and watched until nothing is left of the load.

What must hold, whatever the plan:

- every accepted request ends exactly once, with the reference's text and tokens, or with an error that faults explain;
- no process ends by itself, no task fails, no error is logged;
- the engines' cores are consistent, also while they work;
- once faults have stopped, every request ends within `END_S`, and within `QUIET_S` more nothing is kept anywhere;
- no message is above the payload limit.

Virtual time is seconds since every member was ready.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from antiphon.shared import limits
from tests.sim.model import Reference
from tests.sim.plan import CALM_S, Fault, Load, Plan
from tests.sim.residue import residue
from tests.sim.society import Answer, Member, Society
from tests.support.memory_connection import Flight
from tests.support.simulation import DeadlockError, TimeLimitError, run_simulation

END_S = 45.0
"""From the end of the faults to the end of the last request: a placement may wait `QUEUE_WAIT_S`."""
QUIET_S = 4 * limits.ORPHAN_S
POLL_S, CLEAN_S = 0.25, 1.0
"""How often leftovers are looked for, and how long there must be none."""
ASK_AGAIN_S = 0.3
"""A refused client's pause."""
MESSAGES_KEPT = 400
REFUSALS = (
    "no_engine",
    "no_tokenizer",
    "no_detokenizer",
    "bus_unavailable",
    "draining",
    "server_is_overloaded",
    "model_not_found",
)


@dataclass
class Result:
    """What a run gave."""

    seed: int
    violations: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """Faults, members that come and go, requests that end: one line each."""
    messages: list[str] = field(default_factory=list)
    """The last messages before the first violation, where they were asked for."""
    fingerprint: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def report(self) -> str:
        """For a reader who has to find the cause."""
        return "\n".join([*(f"VIOLATION: {v}" for v in self.violations), *self.messages, *self.events])


def run_plan(plan: Plan, model_dirs: tuple[str, ...], messages: bool = False) -> Result:
    """Runs it in virtual time. Never raises for what the product does wrong."""
    swarm = Swarm(plan, model_dirs, messages)
    with _logged_errors(swarm), _bounds(plan):
        try:
            run_simulation(swarm.main, plan.seed, limit_s=CALM_S + END_S + QUIET_S + 60.0)
        except (DeadlockError, TimeLimitError, AssertionError) as error:
            swarm.violation(f"{type(error).__name__}: {error}")
    return swarm.result


class Swarm:
    """The run itself."""

    def __init__(self, plan: Plan, model_dirs: tuple[str, ...], messages: bool) -> None:
        self.plan = plan
        self.result = Result(plan.seed)
        self._dirs = model_dirs
        self._draw = random.Random(f"run {plan.seed}")
        self._messages: deque[str] | None = deque(maxlen=MESSAGES_KEPT) if messages else None
        self._answers: dict[int, Answer] = {}
        self._blows: list[tuple[float, Fault]] = []
        self._starting: set[str] = set()
        self._over = False

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        plan = self.plan
        self.society = Society(self._dirs, plan.seed, plan.models, plan.delay_s, **plan.flags)
        self.society.step_s = plan.step_s
        self.society.waits = True
        self._start_s = loop.time()
        for place in plan.members:
            await self._start(place.name)
        await self.society.ready()
        self._start_s = loop.time()
        self.society.bus.observer = self._observe if self._messages is not None else None
        faults = [asyncio.create_task(self._fault(fault)) for fault in plan.faults]
        clients = [asyncio.create_task(self._client(load)) for load in plan.loads]
        await self._calm(faults)
        if clients:
            _, waiting = await asyncio.wait(clients, timeout=END_S)
            for load, client in zip(plan.loads, clients, strict=True):
                if client in waiting:
                    self.violation(f"r{load.number} has not ended {END_S:g} s after the last fault")
        for client in clients:
            if client.done() and not client.cancelled():
                client.result()
        if not self.result.violations:
            await self._quiesce()
        self._finish()

    # --- faults ---

    async def _fault(self, fault: Fault) -> None:
        await self._sleep_until(fault.at_s)
        self._blows.append((self.now(), fault))
        society = self.society
        if fault.kind in ("drop", "duplicate", "delay"):
            await self._disturb(fault)
        elif fault.kind == "outage":
            await self._outage(fault)
        else:
            member = society.members.get(fault.target)
            if member is None:
                self.event(f"{fault.kind} {fault.target}: does not run")
                return
            await {
                "kill": self._kill,
                "drain": self._drain,
                "freeze": self._freeze,
                "cut": self._cut,
                "slow": self._slow,
            }[fault.kind](member, fault)

    async def _disturb(self, fault: Fault) -> None:
        bus, pair = self.society.bus, {"sender": fault.sender, "target": fault.receiver}
        if fault.kind == "drop":
            active = bus.drop(fault.pattern, fault.probability, **pair)
        elif fault.kind == "duplicate":
            active = bus.duplicate(fault.pattern, fault.probability, **pair)
        else:
            active = bus.delay(fault.pattern, *fault.delay_s, **pair)
        self.event(f"{fault}")
        await asyncio.sleep(fault.seconds)
        active.remove()
        self.event(f"end of {fault.kind} {fault.pattern} ({active.hits} messages)")

    async def _outage(self, fault: Fault) -> None:
        society = self.society
        self.event(f"outage of the bus for {fault.seconds:.2f} s")
        society.connectable.clear()
        cut = list(society.members.values())
        for member in cut:
            society.cut(member)
        await asyncio.sleep(fault.seconds)
        society.connectable.set()
        self.event("the bus is back")
        for member in cut:
            await asyncio.sleep(self._draw.uniform(0.0, 0.1))
            society.heal(member)

    async def _kill(self, member: Member, fault: Fault) -> None:
        self.event(f"kill {member.name}")
        self.society.kill(member.name)
        await asyncio.sleep(fault.seconds)
        await self._start(member.name)

    async def _drain(self, member: Member, fault: Fault) -> None:
        self.event(f"SIGTERM to {member.name}")
        self.society.terminate(member.name)
        await member.gone.wait()
        self.event(f"{member.name} has ended")
        await asyncio.sleep(fault.seconds)
        await self._start(member.name)

    async def _freeze(self, member: Member, fault: Fault) -> None:
        self.event(f"freeze {member.name} for {fault.seconds:.2f} s")
        self.society.freeze(member)
        await asyncio.sleep(fault.seconds)
        self.society.thaw(member, self._draw.random() < 0.5)
        self.event(f"thaw {member.name}")

    async def _cut(self, member: Member, fault: Fault) -> None:
        self.event(f"cut {member.name} off for {fault.seconds:.2f} s")
        self.society.cut(member)
        await asyncio.sleep(fault.seconds)
        self.society.heal(member)
        self.event(f"heal {member.name}")

    async def _slow(self, member: Member, fault: Fault) -> None:
        self.event(f"{member.name} takes {fault.delay_s[1]:g} s a step for {fault.seconds:.2f} s")
        member.service.driver.step_s = fault.delay_s[1]
        await asyncio.sleep(fault.seconds)
        member.service.driver.step_s = self.plan.step_s
        self.event(f"{member.name} is as fast as before")

    async def _start(self, name: str) -> None:
        if name in self.society.members or name in self._starting:
            return
        self._starting.add(name)
        place = next(place for place in self.plan.members if place.name == name)
        options = self.plan.worker if place.kind == "engine" else {}
        member = await self.society.start(place.kind, name, place.model, **options)
        self._starting.discard(name)
        self.event(f"{name} runs as {member.host.instance_id}")

    async def _calm(self, faults: "list[asyncio.Task[None]]") -> None:
        """Waits for the ends of all faults: a drain may take longer than the others."""
        for fault in faults:
            await fault
        self.event("no more faults")

    # --- clients ---

    async def _client(self, load: Load) -> None:
        await self._sleep_until(load.at_s)
        society, attempt = self.society, 0
        gateways = sum(place.kind == "gateway" for place in self.plan.members)
        while True:
            name = f"gateway{(load.gateway + attempt) % gateways}"
            member = society.members.get(name)
            answer = self._answers[load.number] = Answer()
            if member is not None:
                leaving = asyncio.create_task(self._leave(load, member, answer))
                await society.ask(load.request(attempt, self.plan.models[load.model].name), name, answer)
                leaving.cancel()
                if not answer.refused:
                    break
                assert answer.error is not None
                if answer.error.code not in REFUSALS:
                    self.violation(f"r{load.number} was refused: {answer.error.code}: {answer.error}")
                    return
            attempt += 1
            await asyncio.sleep(ASK_AGAIN_S)
        self._judge(load, answer)

    async def _leave(self, load: Load, gateway: Member, answer: Answer) -> None:
        if load.cancel_after_s is not None:
            await asyncio.sleep(load.cancel_after_s)
            if answer.accepted_s is not None and not answer.ends:
                self.event(f"the client of r{load.number} leaves")
                self.society.cancel(gateway, answer)

    # --- verdicts ---

    def _judge(self, load: Load, answer: Answer) -> None:
        name, error = f"r{load.number}", answer.error
        outcome = "lost" if answer.lost else "cancelled" if answer.cancelled else error.code if error else "ok"
        self.result.outcomes[outcome] = self.result.outcomes.get(outcome, 0) + 1
        self.event(f"{name} ends: {outcome}")
        whole = error is None and not answer.lost
        if not answer.lost and answer.ends != 1:
            self.violation(f"{name} has ended {answer.ends} times")
        for index, expected in enumerate(load.references(self.plan.models[load.model])):
            self._compare(f"{name}-{index}", index, answer, expected, whole)
        for number, prompt in enumerate(load.prompts):
            self._compare_prompt(f"{name}-{number * load.n}", number * load.n, answer, load, prompt)
        if error is not None and not self._explained(answer):
            self.violation(f"{name} failed although nothing explains it: {error.code}: {error}")

    def _compare(self, name: str, index: int, answer: Answer, expected: Reference, whole: bool) -> None:
        token_ids, text = tuple(answer.token_ids.get(index, ())), answer.texts.get(index, "")
        finish = answer.finish.get(index)
        if (finish is not None and finish != "error") or whole:
            vector = answer.vectors.get(index, b"")
            got = Reference(token_ids, text, str(finish), answer.stop_reason.get(index), vector)  # type: ignore[arg-type]
            if got != expected:
                self.violation(f"{name} got {got}, not {expected}")
        elif token_ids != expected.token_ids[: len(token_ids)] or not expected.text.startswith(text):
            self.violation(f"{name} got {token_ids} {text!r}, which does not begin {expected}")

    def _compare_prompt(self, name: str, index: int, answer: Answer, load: Load, prompt: str) -> None:
        wanted = list(prompt.encode()) if load.params.prompt_logprobs is not None else []
        found, has_output = answer.prompts.get(index, []), bool(answer.token_ids.get(index))
        if found != (wanted if has_output else wanted[: len(found)]):
            self.violation(f"{name} got log probabilities of the prompt {found}, not {wanted}")

    def _explained(self, answer: Answer) -> bool:
        assert answer.error is not None
        assert answer.accepted_s is not None
        assert answer.ended_s is not None
        code = answer.error.code
        if code == "client_closed_request":
            return answer.cancelled
        if code == "bus_unavailable":  # the gateway's own buffer was full, or it was cut off for too long
            waited_s = answer.ended_s - answer.accepted_s
            return "OUTBOUND_BYTES_MAX" in self.plan.bounds or waited_s >= limits.BUS_WAIT_S
        if code in ("no_engine", "no_detokenizer", "no_tokenizer", "server_is_overloaded"):
            return answer.ended_s - answer.accepted_s >= limits.QUEUE_WAIT_S
        if code == "engine_failure" and "Several engines" in answer.error.message:
            # Frozen engines and those that cannot be heard count as lost until they are heard again.
            return sum(fault.kind not in ("duplicate", "slow") for _, fault in self._blows) >= limits.DEATHS_MAX
        return False

    async def _quiesce(self) -> None:
        """Nothing may be left once the orphans' time is over. A thawed process first reads what has waited for it."""
        deadline, clean_s = self.now() + QUIET_S, 0.0
        while clean_s < CLEAN_S:
            await asyncio.sleep(POLL_S)
            found = residue(self.society)
            clean_s = 0.0 if found else clean_s + POLL_S
            if found and self.now() > deadline:
                for what in found:
                    self.violation(f"{QUIET_S:g} s after the last request {what}")
                return

    def _finish(self) -> None:
        self._over = True
        society, result = self.society, self.result
        for name, error in society.crashes:
            self.violation(f"{name} ended by itself: {error!r}")
        largest, most = society.bus.largest_payload, society.bus.max_payload
        if largest > most:
            self.violation(f"a message of {largest} bytes, at most {most}")
        result.fingerprint = society.bus.fingerprint
        result.seconds = self.now()

    # --- the record ---

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    def event(self, text: str) -> None:
        self.result.events.append(f"{self.now():7.3f}  {text}")

    def violation(self, text: str) -> None:
        try:
            now = f"{self.now():.3f} s: "
        except RuntimeError:
            now = ""
        if not self.result.violations and self._messages is not None:
            self.result.messages = list(self._messages)
        self.result.violations.append(now + text)

    def logged(self, record: logging.LogRecord) -> None:
        if not self._over:
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            self.violation(f"logged as {record.levelname.lower()}: {record.getMessage()}\n{trace}".rstrip())

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if not self._over:
            self.violation(f"{context.get('message')}: {error!r} {_place(error)}")

    def _observe(self, what: str, flight: Flight) -> None:
        assert self._messages is not None
        if ".hb." not in flight.delivery.subject:
            shown = codec_text(flight.delivery.payload)
            way = f"{flight.sender.name} > {flight.target.owner.name}"
            self._messages.append(f"{self.now():7.3f}  {what} {way} {flight.delivery.subject} {shown}")

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now()))


def codec_text(payload: bytes) -> str:
    """A message as text, shortened."""
    import msgspec

    try:
        return str(msgspec.msgpack.decode(payload))[:300]
    except msgspec.MsgspecError:
        return repr(payload[:60])


def _place(error: object) -> str:
    trace = getattr(error, "__traceback__", None)
    places = []
    while trace is not None:
        places.append(f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(places)


class _Errors(logging.Handler):
    def __init__(self, swarm: Swarm) -> None:
        super().__init__(logging.ERROR)
        self._swarm = swarm

    def emit(self, record: logging.LogRecord) -> None:
        self._swarm.logged(record)


@contextmanager
def _logged_errors(swarm: Swarm) -> Iterator[None]:
    """What is logged as an error is a violation; warnings are the product's business."""
    root, handler = logging.getLogger(), _Errors(swarm)
    kept, level = root.handlers, root.level
    root.handlers, root.level = [handler], logging.ERROR
    try:
        yield
    finally:
        root.handlers, root.level = kept, level


@contextmanager
def _bounds(plan: Plan) -> Iterator[None]:
    kept = {name: getattr(limits, name) for name in plan.bounds}
    for name, value in plan.bounds.items():
        setattr(limits, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(limits, name, value)
