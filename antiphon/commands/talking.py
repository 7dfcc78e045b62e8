"""The commands that ask a model: `chat`, `complete` and `run-batch`."""

import argparse
import os
from pathlib import Path

from antiphon.commands.command import Command, client_of
from antiphon.commands.parser import Parser
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import SERVER, address_of, server_flags


def _chat_flags(parser: Parser) -> None:
    parser.add_argument("question", nargs="*", metavar="QUESTION", help="ask this and end (default: a conversation)")
    server_flags(parser)
    parser.add_argument("--model", default="", help="model to talk to (default: the server's first)")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message that starts the conversation")
    _image_flag(parser, "image of the first message (repeatable); needs a server with --enable-mm")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of likely tokens to draw from (default: 1.0)")
    parser.add_argument("--top-k", type=int, default=None, help="number of likely tokens to draw from")
    parser.add_argument("--min-p", type=float, default=None, help="least probability, as a share of the likeliest's")
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same text (default: chance)")
    parser.add_argument("--stop", action="append", default=None, metavar="TEXT", help="ends the answer (repeatable)")
    parser.add_argument(
        "--response-format",
        default=None,
        metavar="JSON|FILE",
        help='form of the answer, as in requests, such as \'{"type": "json_object"}\'',
    )


def _image_flag(parser: Parser, told: str) -> None:
    parser.add_argument("--image", metavar="FILE", action="append", type=Path, default=None, help=told)


def _complete_flags(parser: Parser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--model", default="", help="directory of the model, or its hub name (default: the demo model)")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a message to answer, not a text to continue")
    _image_flag(parser, "image (repeatable); without --chat PROMPT has the model's token for each")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest continuation (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of likely tokens to draw from (default: 1.0)")
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same text (default: chance)")
    parser.add_argument("--stop", action="append", default=None, help="text that ends the continuation (repeatable)")
    parser.add_argument("--dtype", default="auto", help="type of weights and activations (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=None, help="longest context (default: the model's)")


def _batch_flags(parser: Parser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", type=Path, help="requests, one JSON object a line")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="answers; a file that exists is continued")
    server_flags(parser, server="a server that runs (default: one is started for the batch)")
    parser.add_argument("--model", default="", help="model of the server that is started (default: the demo model)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once (default: %(default)s)")


def _chat(options: argparse.Namespace) -> int:
    from antiphon.chat import command

    return command.run(client_of(options), options)


def _complete(options: argparse.Namespace) -> int:
    import secrets

    from antiphon import complete
    from antiphon.offline.sampling_params import SamplingParams

    try:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            stop=options.stop,
        )
        settings = {"dtype": options.dtype, "max_model_len": options.max_model_len}
        prompt = complete.Prompt(text=options.prompt, chat=options.chat, images=options.image or ())
        return complete.run(prompt, options.model, params, as_json=options.json, **settings)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _run_batch(options: argparse.Namespace) -> int:
    from antiphon import batch

    if options.concurrency < 1:
        raise SettingsError(f"--concurrency: {options.concurrency} is not at least 1")
    if options.server and options.model:
        raise SettingsError("--model is for a server that is started here: leave it out beside --server")
    given = options.server or (os.environ.get(SERVER) and not options.model)
    address = address_of(options) if given else None
    return batch.run(
        options.input,
        options.output,
        address,
        concurrency=options.concurrency,
        model=options.model,
        as_json=options.json,
    )


COMMANDS = (
    Command(
        name="chat", audience="users", help="talk to a server, or ask it one question", run=_chat, flags=_chat_flags
    ),
    Command(
        name="complete",
        audience="users",
        help="continue a text with a model in this process",
        run=_complete,
        flags=_complete_flags,
    ),
    Command(
        name="run-batch",
        audience="users",
        help="answer a file of requests in OpenAI's batch format",
        run=_run_batch,
        flags=_batch_flags,
    ),
)
