"""The commands about machines: `plan`, `doctor`, `ranktable` and `tools-path`."""

import argparse
from pathlib import Path

from antiphon.commands.command import Command
from antiphon.commands.parser import Parser
from antiphon.commands.serving import FIRST, add_serve_flags, named_model
from antiphon.shared.flags import parse
from antiphon.terminal.exit_codes import NotFoundError
from antiphon.terminal.output import in_json


def _plan_flags(parser: Parser) -> None:
    parser.add_argument("--gpu", default="", metavar="NAME", help="card to plan for, such as L20 (default: all)")
    parser.add_argument("--memory-gb", type=float, default=None, help="memory of the card, GiB, instead of a known one")
    add_serve_flags(parser)


def _doctor_flags(parser: Parser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="port that must be free (default: %(default)s)")
    parser.add_argument("--model", default="", help="model directory to look at (default: the demo model)")
    parser.add_argument("--hf-overrides", default="", metavar="JSON", help="fields of config.json, as of `serve`")
    parser.add_argument("--sizing", action="store_true", help="print only which cards a model needs, or this --model")


def _ranktable_flags(parser: Parser) -> None:
    about = "gen: this machine's tables; merge: join"
    parser.add_argument("--mode", required=True, choices=("gen", "merge"), help=about)
    about = "directory of the tables (default: the current one)"
    parser.add_argument("--save-dir", type=Path, default=Path(), help=about)
    parser.add_argument("--api-server", action="store_true", help="gen: this machine has the scheduler, one in all")
    for role in ("prefill", "decode"):
        about = f"gen: device ids of each {role} instance of this machine, such as 4,5"
        parser.add_argument(f"--{role}-server-list", nargs="+", action="extend", metavar="IDS", help=about)
    parser.add_argument("--ip", default="", help="gen: this machine's address (default: that of its default route)")
    about = "merge: the global tables of all machines"
    parser.add_argument("--global-ranktable-list", nargs="+", action="extend", type=Path, metavar="FILE", help=about)


def _plan(options: argparse.Namespace) -> int:
    from antiphon.advice import plan

    options.model = named_model(options)
    return plan.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from antiphon.advice import doctor
    from antiphon.shared.config import EngineSettings

    model = parse(EngineSettings, argparse.Namespace(model=options.model, hf_overrides=options.hf_overrides), {})
    return doctor.run(model, options.port, sizing=options.sizing, as_json=options.json)


def _ranktable(options: argparse.Namespace) -> int:
    from antiphon.disaggregation import table_tool

    return table_tool.run(options)


def _tools_path(options: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parents[2]
    found = [path for path in (root / "infra" / "llm_tools", root / "llm_tools") if path.is_dir()]
    if not found:
        raise NotFoundError("the scripts are not installed here; `antiphon ranktable` and `start-role` do the same")
    print(in_json({"path": str(found[0])}) if options.json else found[0])
    return 0


COMMANDS = (
    Command(
        name="plan",
        audience="users",
        help="estimate a model's memory, and list GPUs on which it fits",
        run=_plan,
        flags=_plan_flags,
        first=("gpu", "memory-gb", "json", *FIRST),
    ),
    Command(
        name="doctor",
        audience="users",
        help="check that this machine has what is needed",
        run=_doctor,
        flags=_doctor_flags,
    ),
    Command(
        name="ranktable",
        audience="operators",
        help="make or join rank tables of a prefill/decode split",
        run=_ranktable,
        flags=_ranktable_flags,
    ),
    Command(
        name="tools-path",
        audience="operators",
        help="print LLM_TOOLS_PATH: where the scripts for rank tables are",
        run=_tools_path,
    ),
)
