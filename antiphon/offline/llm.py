"""`LLM`: runs a model in this process and generates for lists of prompts, with the engine of the engine service."""

import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from antiphon.offline.adapters import LoRARequests, PromptAdapterRequests
from antiphon.offline.engine_args import engine_args
from antiphon.offline.pooling_calls import PoolingCalls
from antiphon.offline.progress import progress_bar
from antiphon.offline.prompts.guided import GuidedDecodingRequest, LLMGuidedOptions, with_guidance
from antiphon.offline.prompts.inputs import Prompt, PromptInput, TokenIds, paired, prompts_of
from antiphon.offline.prompts.prompt_text import Message, TemplateOptions
from antiphon.offline.runner import Runner
from antiphon.offline.sampling_params import SamplingParams
from antiphon.shared.request.outputs import RequestOutput


class LLM(PoolingCalls):
    """A model with its tokenizer and KV cache. The prompts of one call are batched as far as the KV cache permits.

    Every other setting of the engine can be given as a keyword argument: the name of its flag with underscores. An
    object must not be used by several threads at the same time; use `AsyncLLMEngine` for concurrent requests.

    Raises TypeError for an unknown argument, and ValueError for an unsupported value or a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4,
        cpu_offload_gb: float = 0,
        enforce_eager: bool | None = None,
        max_context_len_to_capture: int | None = None,
        max_seq_len_to_capture: int = 8192,
        disable_custom_all_reduce: bool = False,
        disable_async_output_proc: bool = False,
        **kwargs: Any,
    ) -> None:
        runner = Runner(
            engine_args(
                model=model,
                tokenizer=tokenizer,
                tokenizer_mode=tokenizer_mode,
                skip_tokenizer_init=skip_tokenizer_init,
                trust_remote_code=trust_remote_code,
                tensor_parallel_size=tensor_parallel_size,
                dtype=dtype,
                quantization=quantization,
                revision=revision,
                tokenizer_revision=tokenizer_revision,
                seed=seed,
                gpu_memory_utilization=gpu_memory_utilization,
                # None: the engine's default, which is 4 GiB, or half of the free memory if that is less.
                swap_space=None if swap_space == 4 else swap_space,
                cpu_offload_gb=cpu_offload_gb,
                enforce_eager=enforce_eager,
                max_context_len_to_capture=max_context_len_to_capture,
                max_seq_len_to_capture=max_seq_len_to_capture,
                disable_custom_all_reduce=disable_custom_all_reduce,
                disable_async_output_proc=disable_async_output_proc,
                **kwargs,
            )
        )
        super().__init__(runner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: TokenIds | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        prompt_adapter_request: PromptAdapterRequests = None,
        guided_options_request: GuidedDecodingRequest | LLMGuidedOptions | None = None,
        *,
        inputs: PromptInput | Sequence[PromptInput] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates for the prompts and returns one result for each, in the order of the prompts.

        `prompts` (or `inputs`) is a text, a dict with `prompt` or `prompt_token_ids`, or a list of these. A dict may
        also be an engine's request, as at `/generate`: with `messages`, or `history`, `system` and `prompt`, in place
        of a prompt, with `request_id` and `arrival_time`, which the result repeats, and with `eos_token_ids`. With
        `enable_mm=True` such a dict may have `multi_modal_data`: `{"image": image}` or a list of images, each a
        `PIL.Image` or the bytes of a file; the prompt must contain the model's image token once per image.
        `sampling_params` applies to all prompts, or is a list with one item for each prompt; None means
        `SamplingParams()`. `lora_request` is an adapter for all prompts, or a list with an adapter or None for each;
        it needs `enable_lora=True`. `prompt_adapter_request` is a prompt adapter, given in the same way; it needs
        `enable_prompt_adapter=True`, and its virtual tokens count towards the context. `guided_options_request` is a
        structure that every output must follow. `priority` has one number for each prompt; prompts with lower numbers
        run first.

        Raises ValueError or TypeError for invalid arguments before any prompt runs. An error while a prompt runs ends
        only that prompt's result, which then has `error_code` and `error_msg`.
        """
        if prompts is not None and inputs is not None:
            raise ValueError("'inputs' is another name of 'prompts': give one of them.")
        if prompt_token_ids is not None:
            message = "'prompt_token_ids' is deprecated: give prompts of the form {'prompt_token_ids': [...]}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        given = prompts_of(prompts if inputs is None else inputs, prompt_token_ids, takes_engine_form=True)
        found = [self._runner.rendered(prompt) for prompt in given]
        params = with_guidance(sampling_params, guided_options_request)
        return self._run(found, params, use_tqdm, priority, lora_request, prompt_adapter_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation or of each of several; returns the results in their order.

        A message has `role` and `content` (a text, or a list of parts of the types `text`, `image_url` with a data URL,
        and `image_pil` with a `PIL.Image`), and the further fields of the HTTP API, such as `tool_calls`.
        `chat_template` is a file or the template itself; None selects the model's own template. `tools` and `documents`
        are given to the template, as are `chat_template_kwargs`, its further variables. With `continue_final_message`,
        which needs `add_generation_prompt=False`, the output continues the last message. Calls of tools are not
        separated from the text. All else is as in `generate`.
        """
        options = TemplateOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = self._runner.conversations(messages, options)
        return self._run(prompts, sampling_params, use_tqdm, None, lora_request, is_chat=True)

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer as a transformers object. Raises ValueError if there is no tokenizer."""
        return self._runner.text.transformers_tokenizer()

    def close(self) -> None:
        """Frees the model's memory. This LLM cannot be used afterwards."""
        self._runner.close()

    def _request_ids(self, prompts: list[Prompt]) -> list[str]:
        """Returns each request's id: the caller's, or else one of its own. Raises ValueError for an id given twice."""
        given: set[str] = set()
        for name in (prompt.form.request_id for prompt in prompts if prompt.form.request_id):
            if name in given:
                raise ValueError(f"The request id {name!r} is in use.")
            given.add(name)
        free = (name for number in self._ids if (name := str(number)) not in given)
        return [prompt.form.request_id or next(free) for prompt in prompts]

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        lora_request: LoRARequests,
        prompt_adapter_request: PromptAdapterRequests = None,
        *,
        is_chat: bool = False,
    ) -> list[RequestOutput]:
        params = paired(sampling_params, SamplingParams, len(prompts), "sampling_params")
        priorities = paired(priority, int, len(prompts), "priority")
        adapters = self._runner.adapters(lora_request, prompt_adapter_request, len(prompts))
        ids = self._request_ids(prompts)
        requests = self._runner.submitted_all(ids, prompts, params, priorities, adapters, is_chat=is_chat)
        ended: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self._runner.add(request)
            with progress_bar(len(prompts), shown=use_tqdm) as bar:
                while self._runner.has_work:
                    for output in self._runner.step():
                        if output.finished:
                            ended[output.request_id] = output
                            bar.ended(output)
        finally:
            # After an interruption (Ctrl-C, for example) no request may continue during the next call.
            for request_id in ids if len(ended) < len(ids) else ():
                self._runner.abort(request_id)
        return [ended[request_id] for request_id in ids]
