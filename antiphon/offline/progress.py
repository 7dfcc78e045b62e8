"""The progress bar of a call, which shows the number of finished prompts and the tokens per second."""

import time
from types import TracebackType
from typing import Any, Self

from antiphon.offline.pooling import PoolingRequestOutput
from antiphon.shared.request.outputs import RequestOutput


class ProgressBar:
    """A context manager that shows a progress bar for `total` prompts if `shown` is true, and nothing otherwise."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar: Any = None
        self._started = time.monotonic()
        self._prompt_tokens = self._output_tokens = 0
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def ended(self, output: RequestOutput) -> None:
        """Counts a finished prompt and updates the token rates."""
        self._count(len(output.prompt_token_ids or ()), sum(len(one.token_ids) for one in output.outputs))

    def pooled(self, output: PoolingRequestOutput) -> None:
        """Counts a pooled prompt and updates the token rates."""
        self._count(len(output.prompt_token_ids), 0)

    def _count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if self._bar is None:
            return
        self._prompt_tokens += num_prompt_tokens
        self._output_tokens += num_output_tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = f"{self._prompt_tokens / seconds:.0f} prompt, {self._output_tokens / seconds:.0f} output tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()


def progress_bar(total: int, *, shown: bool) -> ProgressBar:
    """Returns a progress bar for `total` prompts."""
    return ProgressBar(total, shown=shown)
