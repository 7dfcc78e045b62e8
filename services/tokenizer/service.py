"""The tokenizer as a service: loads the codec and the chat template, and runs the actor."""

import asyncio
import contextlib
import logging

from antiphon.services.tokenizer.actor import TokenizerActor
from antiphon.services.tokenizer.renderer import Renderer, WorkerPool
from antiphon.shared.actors.host import Host
from antiphon.shared.config import TokenizerSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import PoolStatus, ServiceName
from antiphon.shared.models.model_files import described, located, model_name, tokenizer_directory
from antiphon.shared.text.codec import NO_TOKENIZER, Codec, TextFacts, choose_codec
from antiphon.shared.text.digests import template_digest, tokenizer_digest
from antiphon.shared.text.special_tokens import SpecialTokens
from antiphon.shared.text.templates.conversation_templates import choose_template
from antiphon.shared.text.templates.template_formats import reasoning_format, tool_format

log = logging.getLogger(__name__)


class TokenizerService:
    """One replica. Files are loaded on a thread. The first template worker is started when the replica is ready.

    Construction raises SettingsError if the tokenizer's directory is not found.
    """

    name: ServiceName = "tokenizer"

    def __init__(self, settings: TokenizerSettings) -> None:
        # With a separate tokenizer (`--tokenizer`), the model's directory need not be on this machine.
        self._settings = described(settings) if settings.tokenizer else located(settings, weights=False)
        self._directory = tokenizer_directory(self._settings)
        self._actor: TokenizerActor | None = None
        self._warming: asyncio.Task[None] | None = None
        self._tool_format = self._reasoning_format = ""
        self._digests = "", ""
        """Of the tokenizer's files and of the chat template."""

    async def start(self, host: Host) -> None:
        """See Service. Raises SettingsError if the directory has no usable tokenizer."""
        codec, facts = await asyncio.to_thread(self._load)
        self._tool_format = tool_format(facts.template(True) or "")
        self._reasoning_format = reasoning_format(facts.template(False) or "")
        pool = None
        if facts.chat_template is not None:
            pool = WorkerPool(facts.chat_template, facts.named_tokens, facts.tool_template)
        none = Renderer(NO_TOKENIZER) if self._settings.skip_tokenizer_init else Renderer()
        if facts.conv_template:
            log.info("conversations have the layout of the template %s", facts.conv_template)
        # Only a template from the settings is meant for pairs: many rerankers still have the chat template of their
        # base model.
        scores = bool(self._settings.chat_template)
        name = model_name(self._settings)
        escaped = SpecialTokens(codec.special_texts) if self._settings.escape_special_tokens else None
        self._actor = TokenizerActor(host, codec, pool or none, facts, name, score_template=scores, escaped=escaped)
        await self._actor.listen()
        self._actor_task = asyncio.create_task(self._actor.run())
        if pool is not None:
            self._warming = asyncio.create_task(pool.warm())

    def status(self) -> PoolStatus:
        """See Service."""
        return PoolStatus(
            num_requests=self._actor.num_requests if self._actor else 0,
            num_tokens=self._actor.num_tokens if self._actor else 0,
            model=model_name(self._settings),
            tool_format=self._tool_format,
            reasoning_format=self._reasoning_format,
            tokenizer_digest=self._digests[0],
            template_digest=self._digests[1],
        )

    async def run(self) -> None:
        """See Service."""
        assert self._actor is not None
        parts = {self._actor_task, self._actor.broken}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            await part

    async def drain(self) -> None:
        """See Service. Answers all requests that have arrived."""
        assert self._actor is not None
        if self._warming is not None:
            self._warming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._warming
        await self._actor.stop()
        await self._actor_task

    def _load(self) -> tuple[Codec, TextFacts]:
        settings, directory = self._settings, self._directory
        codec = choose_codec(settings, directory)
        if settings.escape_special_tokens and not all(codec.special_texts):
            raise SettingsError("--escape-special-tokens needs a tokenizer with a tokenizer.json")
        if settings.skip_tokenizer_init:
            return codec, TextFacts(named_tokens={}, chat_template=None)
        facts = choose_template(settings, directory, codec)
        self._digests = tokenizer_digest(directory), template_digest(facts)
        return codec, facts
