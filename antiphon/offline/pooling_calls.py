"""The calls of `LLM` that return vectors, labels and scores in place of text. Used by `llm` only."""

import itertools
from collections.abc import Sequence

from antiphon.offline.adapters import LoRARequests
from antiphon.offline.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification_output,
    embedding_output,
    pairs,
    scored,
    scoring_output,
)
from antiphon.offline.progress import progress_bar
from antiphon.offline.prompts.inputs import Prompt, PromptInput, paired, prompts_of
from antiphon.offline.runner import Runner


class PoolingCalls:
    """The pooling calls of an `LLM`, which runs them with `runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._ids = itertools.count()

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each prompt, in the order of the prompts.

        `pooling_params` applies to all prompts, or is a list with one item for each prompt; None means
        `PoolingParams()`: vectors of length one, pooled as the model's own files say. `truncate_prompt_tokens` keeps
        this number of first tokens of each prompt, including special tokens; -1 keeps as many as fit into the context.
        Without it, a prompt longer than the context is refused. Raises ValueError or TypeError
        for invalid arguments, and RuntimeError if the engine fails.
        """
        listed = prompts_of(prompts, None)
        found = self._pool(listed, pooling_params, use_tqdm, lora_request, truncate_prompt_tokens)
        return list(map(embedding_output, found))

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns the model's output for each prompt: a vector, or a number for each label of a classification head.

        All else is as in `embed`. If `pooling_params` is None, the model decides between the two.
        """
        if pooling_params is None:
            pooling_params = PoolingParams(classify=bool(self._runner.engine.facts.labels))
        listed = prompts_of(prompts, None)
        return self._pool(listed, pooling_params, use_tqdm, lora_request, truncate_prompt_tokens)

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the label of each prompt, and the number that the model's classification head gives for each label.

        `truncate_prompt_tokens` is as in `embed`. Raises the same errors as `embed`; ValueError for a model without
        such a head.
        """
        params = PoolingParams(classify=True)
        found = self._pool(prompts_of(prompts, None), params, use_tqdm, None, truncate_prompt_tokens)
        return [classification_output(output, self._runner.engine.facts.labels) for output in found]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns the similarity of each pair of texts: the cosine of their vectors, or the output of a cross-encoder.

        A cross-encoder is a model with a classification head; it must have exactly one label. A single `text_1` is
        paired with each `text_2`; lists of the same length are paired item by item. `truncate_prompt_tokens` is as in
        `embed`; if a pair is computed as one prompt, its longer text is shortened first. `chat_template` is the score
        template that makes one prompt of a pair (a file or its text); None: the template of `LLM`. Raises the same
        errors as `embed`.
        """
        first, second = pairs(text_1, text_2)
        labels = self._runner.engine.facts.labels
        if labels:
            if len(labels) > 1:
                raise ValueError(
                    f"Scores need a classification head with one label, not {len(labels)}: use classify()."
                )
            both = zip(first * (len(second) // len(first)), second, strict=True)
            prompts = [Prompt(text=one, second_text=other, score_template=chat_template) for one, other in both]
            params = PoolingParams(classify=True)
            return list(map(scoring_output, self._pool(prompts, params, use_tqdm, None, truncate_prompt_tokens)))
        if chat_template is not None:
            raise ValueError("A score template is for a model with a classification head, and this one has none.")
        found = self.embed([*first, *second], use_tqdm=use_tqdm, truncate_prompt_tokens=truncate_prompt_tokens)
        return list(scored(found[: len(first)], found[len(first) :]))

    def _pool(
        self,
        prompts: list[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        params = paired(pooling_params, PoolingParams, len(prompts), "pooling_params")
        adapters = self._runner.adapters(lora_request, None, len(prompts))
        ids = [str(next(self._ids)) for _ in prompts]
        ended: dict[str, PoolingRequestOutput] = {}
        with progress_bar(len(prompts), shown=use_tqdm) as bar:
            for output in self._runner.pooled(ids, prompts, params, adapters, truncate_prompt_tokens):
                ended[output.request_id] = output
                bar.pooled(output)
        return [ended[request_id] for request_id in ids]
