"""The process that checks grammars: `python -m antiphon.services.tokenizer.grammar_worker`. `grammar_checker` has it.

A grammar is untrusted input to a compiler, so the process limits its own memory, processor time and files. It answers
jobs from standard input until end of file and keeps no state between them, so it can be killed at any time.
"""

import signal
import sys

import msgspec

from antiphon.services.tokenizer.grammar_frames import GrammarJob, GrammarVerdict
from antiphon.services.tokenizer.sandbox import allow_processor_time, limit_worker, read_frame, write_frame
from antiphon.shared.errors import ServiceError
from antiphon.shared.text.grammars.constraint import byte_tokenizer, check_grammar

ADDRESS_SPACE_BYTES = 2 * 2**30
"""Interpreter and library map about 300 MB, most of it unused; the rest of the limit is for the compiled grammar."""


def main() -> int:
    """Answers jobs until the end of standard input. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt from the terminal
    limit_worker(ADDRESS_SPACE_BYTES)
    tokenizer = byte_tokenizer()
    jobs = msgspec.msgpack.Decoder(GrammarJob)
    while (job := read_frame(sys.stdin.buffer, jobs)) is not None:
        allow_processor_time(job.wall_s)
        verdict = GrammarVerdict()
        try:
            check_grammar(job.grammar, tokenizer)
        except ServiceError as refusal:
            verdict = GrammarVerdict(refusal.message, refusal.param or "")
        write_frame(sys.stdout.buffer, verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
