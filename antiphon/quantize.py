"""`antiphon quantize`: writes a smaller checkpoint of a model, with the options that the specification names.

Option names have one dash and may have several letters, so the parser accepts no abbreviations: `-tp` is not `-t p`.
The work is done in `services/engine/quantizer`, which is imported when it starts.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import CommandError
from antiphon.terminal.output import show, tell

ALGORITHMS = ("weight_only_int8", "smooth_quant", "awq", "gptq")
DEGREES = (1, 2, 4, 8)
DTYPES = ("fp16", "bf16")
_WORST = 3
_MIB = 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("-i", dest="model", required=True, type=Path, metavar="DIR", help="directory of the model")
    parser.add_argument("-o", dest="output", required=True, type=Path, metavar="DIR", help="directory to write")
    parser.add_argument("-quant_type", dest="algorithm", required=True, choices=ALGORITHMS, help="algorithm")
    parser.add_argument(
        "-tp", type=int, required=True, choices=DEGREES, help="devices that will serve the model: matrices must divide"
    )
    parser.add_argument("-t", dest="dtype", required=True, choices=DTYPES, help="type of what is not quantized")
    parser.add_argument(
        "-sq",
        dest="strength",
        type=float,
        metavar="0..1",
        help="smooth_quant: share of the activations' range that moves into the weights (default: 0.8; GLM-130B: 0.75)",
    )
    parser.add_argument(
        "-token",
        "--tokenids_path",
        "--tokenids-path",
        dest="token_file",
        type=Path,
        metavar="FILE",
        help="token ids to calibrate with, a sample in each line (default: text that comes with antiphon)",
    )
    parser.add_argument(
        "--multi-query-mode", action="store_true", help="smooth_quant: confirms that the model shares key heads"
    )
    parser.add_argument(
        "--desc-act",
        action="store_true",
        help="gptq: activation order: the most important inputs are rounded first, which lowers the error",
    )
    parser.add_argument(
        "--round-embedding",
        action=argparse.BooleanOptionalAction,
        help="weight_only_int8: whether the embedding gets 8 bits too, which not all other packages read "
        "(default: if it is more than a tenth of the weights)",
    )


def run(options: argparse.Namespace) -> int:
    """Quantizes, and prints the report. Returns 0. Raises CommandError after an error such as a full disk.

    Raises SettingsError for options that contradict each other or the model.
    """
    _check(options)
    for notice in _ignored(options):
        tell(f"warning: {notice}")
    from antiphon.services.engine.quantizer.job import Job
    from antiphon.services.engine.quantizer.run import quantize

    job = Job(
        model=options.model,
        output=options.output,
        algorithm=options.algorithm,
        tensor_parallel=options.tp,
        dtype=options.dtype,
        strength=options.strength,
        token_file=options.token_file,
        multi_query=options.multi_query_mode,
        activation_order=options.desc_act,
        rounds_embedding=options.round_embedding,
    )
    if job.algorithm == "weight_only_int8":
        job = replace(job, token_file=None)
    if job.algorithm != "smooth_quant":
        job = replace(job, strength=None, multi_query=False)
    if job.algorithm != "gptq":
        job = replace(job, activation_order=False)
    try:
        report = quantize(job, tell)
    except ServiceError as error:
        raise SettingsError(f"-i: {error.message}") from error
    except OSError as error:
        raise CommandError(f"{error}. Run the same command again: it continues") from error
    show({**asdict(report), "output": str(job.output)}, _lines(report, job.output), as_json=options.json)
    return 0


def _check(options: argparse.Namespace) -> None:
    strength = options.strength
    if strength is not None and not 0 <= strength <= 1:
        raise SettingsError(f"-sq: {strength:g} is not within 0 and 1")
    if not options.model.is_dir():
        raise SettingsError(f"-i: {options.model} is not a directory")
    inner, outer = options.output.resolve(), options.model.resolve()
    if inner == outer or outer in inner.parents:
        raise SettingsError(f"-o: {options.output} is the model's directory or lies in it; name another one")
    if options.output.exists() and not options.output.is_dir():
        raise SettingsError(f"-o: {options.output} is not a directory")


def _ignored(options: argparse.Namespace) -> list[str]:
    """Returns a warning for each option that the algorithm does not use."""
    name, smooth = options.algorithm, options.algorithm == "smooth_quant"
    unused = {
        "-sq": options.strength is not None and not smooth,
        "--multi-query-mode": options.multi_query_mode and not smooth,
        "--desc-act": options.desc_act and name != "gptq",
        "--round-embedding": options.round_embedding is not None and name != "weight_only_int8",
        "-token": options.token_file is not None and name == "weight_only_int8",
    }
    return [f"{option} has no effect with -quant_type {name}" for option, is_given in unused.items() if is_given]


def _lines(report: Any, output: Path) -> Iterator[str]:
    before, after = report.bytes_before, report.bytes_after
    yield f"weights     {before / _MIB:.1f} MiB before, {after / _MIB:.1f} MiB after ({after / before:.0%})"
    if report.perplexity_before is not None:
        ratio = report.perplexity_after / report.perplexity_before
        figures = f"{report.perplexity_before:.4f} before, {report.perplexity_after:.4f} after"
        yield f"perplexity  {figures} ({ratio - 1:+.2%}) on held-out text"
    worst = sorted(range(len(report.errors)), key=lambda index: -report.errors[index])[:_WORST]
    if worst:
        listed = ", ".join(f"layer {index}: {report.errors[index]:.2%}" for index in worst)
        yield f"worst       {listed} (change of a layer's output)"
    yield f"written to  {output}"
