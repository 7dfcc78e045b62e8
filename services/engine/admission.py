"""Admits sequences to an engine: decides whether a submit may run, and passes it to the step loop.

A sequence with images is passed on when their embeddings have been read. Called by the actor, on the event loop.
"""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec

from antiphon.services.engine.adapter_actor import AdapterActor, AdapterNotHereError
from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.core.plan import PlacedImage
from antiphon.services.engine.core.request import SequenceSpec, with_adapter
from antiphon.services.engine.grammar_gate import LoadAdapter
from antiphon.services.engine.images import ImageLoader
from antiphon.services.engine.records.sequences import SequenceRecords
from antiphon.services.engine.sequence_table import SequenceTable, core_id, of_core
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.blocks import split_hashes
from antiphon.shared.codec import unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Submit, SubmitReply, SubmitStatus
from antiphon.shared.parameters.sampling import check

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoop:
    """What the actor tells the step loop, and what that can do."""

    add: Callable[[SequenceSpec, LoadAdapter | None], None]
    """See `Engine.add`."""
    abort: Callable[[str], None]
    record: Callable[[bool], None] = lambda wanted: None
    """Turns the details of steps in reports on or off."""
    exchanges_kv: bool = False
    """Whether the engine exchanges KV with others; without it, prompts are always computed here."""


class Admission:
    """The admission to one engine.

    `adapters` finds the adapters of sequences; None: the engine serves none. `images` reads the embeddings of
    images; None: the engine accepts text only. `refused` is called for a sequence whose images cannot be read.
    """

    def __init__(
        self,
        host: Host,
        loop: StepLoop,
        sequences: SequenceTable,
        records: SequenceRecords,
        *,
        adapters: AdapterActor | None,
        images: ImageLoader | None,
        refused: Callable[[str, ServiceError], Awaitable[None]],
    ) -> None:
        self._host, self._loop, self._sequences, self._records = host, loop, sequences, records
        self._adapters, self._images, self._refused = adapters, images, refused
        self._arrivals = 0

    def submit(self, submit: Submit, *, draining: bool) -> SubmitReply:
        """Starts or refuses a sequence. Returns the reply to its gateway."""
        status = self._sequences.admit(submit)
        if draining and status == "accepted":
            return self._busy(submit, "draining", "The engine takes no requests now.")
        if status == "busy":
            return self._busy(submit, "server_is_overloaded", "The engine's queue is full.")
        if status == "accepted" and submit.images and (refused := self._reserve_images(submit)) is not None:
            return refused
        if status == "accepted":
            try:
                self._start(submit)
            except ServiceError as error:
                return self._reply(submit, "invalid", error)
            except AdapterNotHereError:
                message = f"The adapter {submit.adapter!r} is not here yet."
                return self._busy(submit, "server_is_overloaded", message)
        return self._reply(submit, status)

    def _start(self, submit: Submit) -> None:
        check(submit.params)
        if submit.kv_transfer_id and not self._loop.exchanges_kv:
            raise ServiceError("unsupported_parameter", "This engine computes no prompts for others.")
        adapter = self._adapter(submit) if submit.adapter else None
        now = self._host.clock.monotonic()
        spec = self._spec(submit, now)
        if isinstance(adapter, LoadedAdapter):
            spec = with_adapter(spec, adapter)
        self._arrivals += 1
        if self._sequences.release(submit.sequence_id, submit.attempt - 1, now):
            former = core_id(submit.sequence_id, submit.attempt - 1)
            self._loop.abort(former)
            self._records.superseded(former)
        self._sequences.register(submit, len(spec.output_token_ids), now)
        self._records.submitted(spec.sequence_id, submit, len(spec.prompt_token_ids))
        load = None if adapter is None or isinstance(adapter, LoadedAdapter) else adapter
        if submit.images:
            self._start_loading(spec, submit, load)
        else:
            self._loop.add(spec, load)

    def _spec(self, submit: Submit, now: float) -> SequenceSpec:
        return SequenceSpec(
            sequence_id=core_id(submit.sequence_id, submit.attempt),
            prompt_token_ids=tuple(unpack_ids(submit.prompt_token_ids)),
            params=submit.params,
            output_token_ids=tuple(unpack_ids(submit.output_token_ids)),
            block_hashes=tuple(split_hashes(submit.block_hashes)),
            cache_salt=submit.cache_salt,
            priority=submit.priority,
            arrival=self._arrivals,
            sequence_group=submit.sequence_group,
            client=submit.client,
            client_weight=submit.client_weight,
            client_priority=submit.client_priority,
            pooling=submit.pooling,
            kv_source=submit.kv_source if self._loop.exchanges_kv else None,
            kv_transfer_id=submit.kv_transfer_id,
            idle_until_s=now + submit.idle_s if submit.idle_s > 0 else 0.0,
            kv_keep_s=min(max(submit.kv_keep_s, 0.0), limits.KV_KEEP_S_MAX),
        )

    def _adapter(self, submit: Submit) -> LoadedAdapter | LoadAdapter:
        if self._adapters is None:
            message = "This engine serves no adapters: start it with --enable-lora or --enable-prompt-adapter."
            raise ServiceError("unsupported_parameter", message, param="model")
        return self._adapters.adapter(submit.adapter, submit.adapter_version)

    # --- images ---

    def _reserve_images(self, submit: Submit) -> SubmitReply | None:
        """Returns the refusal if the engine does not accept images or has no memory for them now; else None."""
        if self._images is None:
            message = "This engine takes text only: start it with --enable-mm."
            return self._reply(submit, "invalid", ServiceError("unsupported_parameter", message))
        try:
            self._images.reserve(core_id(submit.sequence_id, submit.attempt), submit.images, self._is_live)
        except ServiceError as full:
            return self._reply(submit, "busy", full)
        return None

    def _start_loading(self, spec: SequenceSpec, submit: Submit, load_adapter: LoadAdapter | None) -> None:
        """Starts to read the embeddings of a sequence's images.

        Queues the sequence afterwards, unless it has ended meanwhile.
        """
        assert self._images is not None

        def loaded(placed: tuple[PlacedImage, ...]) -> None:
            if self._is_live(spec.sequence_id):
                self._loop.add(replace(spec, images=placed), load_adapter)

        self._images.start(submit.images, loaded, functools.partial(self._refused, spec.sequence_id))

    def _is_live(self, core_sequence_id: str) -> bool:
        return self._sequences.is_live(*of_core(core_sequence_id))

    # --- replies ---

    def _busy(self, submit: Submit, code: str, message: str) -> SubmitReply:
        return self._reply(submit, "busy", ServiceError(code, message, retry_after_s=RETRY_AFTER_S))

    def _reply(self, submit: Submit, status: SubmitStatus, error: ServiceError | None = None) -> SubmitReply:
        reply = SubmitReply(
            sequence_id=submit.sequence_id,
            attempt=submit.attempt,
            status=status,
            engine_id=self._host.id,
            engine_instance_id=self._host.instance_id,
        )
        if error is None:
            return reply
        return msgspec.structs.replace(reply, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
