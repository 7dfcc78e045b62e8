"""The process that renders chat templates: `python -m antiphon.services.tokenizer.render_worker`.

A template is untrusted code, so the process limits its own memory, processor time and files, and `renderer` starts it
without environment variables other than its module path. The process answers jobs from standard input until end of
file. It keeps no state between jobs, so it can be killed at any time. It imports no third-party packages but Jinja and
msgspec, so that it starts in less than 0.1 s.
"""

import signal
import sys

import msgspec

from antiphon.services.tokenizer.render_frames import Rendered, RenderJob, RenderSetup
from antiphon.services.tokenizer.sandbox import allow_processor_time, limit_worker, read_frame, write_frame
from antiphon.shared.text.templates.chat_template import ChatTemplate, TemplateFailedError

ADDRESS_SPACE_BYTES = 768 * 2**20
"""The interpreter uses a tenth of it. The longest allowed conversation needs memory for several copies of its text."""


def main() -> int:
    """Answers jobs until the end of standard input. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt from the terminal
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(source, msgspec.msgpack.Decoder(RenderSetup))
    if setup is None:
        return 0
    limit_worker(ADDRESS_SPACE_BYTES)
    allow_processor_time(setup.wall_s)
    try:
        templates = [
            ChatTemplate(source, setup.constants, setup.output_chars_max)
            for source in (setup.template, setup.tool_template)
            if source is not None
        ]
    except TemplateFailedError as failure:
        write_frame(sink, Rendered(error=str(failure)))
        return 0
    write_frame(sink, Rendered())
    jobs = msgspec.msgpack.Decoder(RenderJob)
    while (job := read_frame(source, jobs)) is not None:
        allow_processor_time(setup.wall_s)
        write_frame(sink, _render(templates, job))
    return 0


def _render(templates: list[ChatTemplate], job: RenderJob) -> Rendered:
    """Renders a conversation. If it has tools, the last template is used."""
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


if __name__ == "__main__":
    sys.exit(main())
