"""The process that renders chat templates: `python -m services.tokenizer.render_worker`, started by `renderer` only.

A template is untrusted code, so the process limits its own memory, processor time and files, and `renderer` starts it
without environment variables other than its module path. The process answers jobs from standard input until end of
file. It keeps no state between jobs, so it can be killed at any time. It imports no third-party packages but Jinja and
msgspec, so that it starts in less than 0.1 s.
"""

import contextlib
import math
import resource
import signal
import sys
from typing import BinaryIO, TypeVar

import msgspec

from services.tokenizer.render_frames import LENGTH_BYTES, Rendered, RenderJob, RenderSetup, pack_frame
from shared.text.chat_template import ChatTemplate, TemplateFailedError

ADDRESS_SPACE_BYTES = 768 * 2**20
"""The interpreter uses a tenth of it. The longest allowed conversation needs memory for several copies of its text."""
OPEN_FILES_MAX = 16
T = TypeVar("T", bound=msgspec.Struct)


def main() -> int:
    """Answers jobs until the end of standard input. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt from the terminal
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(source, msgspec.msgpack.Decoder(RenderSetup))
    if setup is None:
        return 0
    _limit_resources()
    _allow_processor_time(setup.wall_s)
    try:
        templates = [
            ChatTemplate(source, setup.constants, setup.output_chars_max)
            for source in (setup.template, setup.tool_template)
            if source is not None
        ]
    except TemplateFailedError as failure:
        _write(sink, Rendered(error=str(failure)))
        return 0
    _write(sink, Rendered())
    jobs = msgspec.msgpack.Decoder(RenderJob)
    while (job := _read(source, jobs)) is not None:
        _allow_processor_time(setup.wall_s)
        _write(sink, _render(templates, job))
    return 0


def _render(templates: list[ChatTemplate], job: RenderJob) -> Rendered:
    """Renders a conversation, if it has tools with the last of the templates."""
    variables = msgspec.json.decode(job.variables)
    try:
        text = templates[-1 if variables.get("tools") else 0].render(
            msgspec.json.decode(job.messages),
            job.add_generation_prompt,
            variables,
            continue_final_message=job.continue_final_message,
        )
        return Rendered(text=text)
    except TemplateFailedError as failure:
        return Rendered(error=str(failure))


def _limit_resources() -> None:
    wanted = {
        resource.RLIMIT_AS: ADDRESS_SPACE_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES_MAX,
    }
    for limit, value in wanted.items():
        # Some systems define a limit but do not allow it to be set. The parent's time limit still applies there.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


def _allow_processor_time(wall_s: float) -> None:
    """Limits the processor time of the next job, so that the kernel ends the worker even if its parent cannot.

    The limit is `wall_s` plus 1 to 2 seconds from now.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + wall_s) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _read(source: BinaryIO, decoder: "msgspec.msgpack.Decoder[T]") -> T | None:
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return decoder.decode(source.read(int.from_bytes(head, "big")))


def _write(sink: BinaryIO, answer: Rendered) -> None:
    sink.write(pack_frame(answer))
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
