"""The `tools` command: every step under its own name, one printer, one way in which errors end it."""

import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from tools import __version__
from tools.checkpoint.errors import CheckpointError, printable
from tools.checkpoint.layout import checkpoints_in
from tools.checkpoint.report import Report
from tools.postprocess import STEPS, TAKES_RUN

app = typer.Typer(
    help="What happens to a language-model checkpoint after the optimizer has written it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error.")]
Which = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="WHICH", help="Which checkpoints of a run directory: last, N or all."),
]


def add_command(
    step: Callable[..., Report],
    *,
    takes_checkpoint: bool = True,
    extra: str = "torch",
    show: Callable[[Report], None] | None = None,
) -> None:
    """Make a step a command: its own parameters and those of every command, its Report printed, its errors one line.

    `extra` is what to install when a library that the step uses is not there; `show` prints the report for people.
    """
    name = step.__name__.replace("_", "-")
    signature = inspect.signature(step)
    common = {"json": Json, "quiet": Quiet, "verbose": Verbose} | ({"which": Which} if takes_checkpoint else {})
    first = next(iter(signature.parameters))

    def command(
        *, json: bool = False, quiet: bool = False, verbose: bool = False, which: str | None = None, **given: Any
    ) -> None:
        exit_codes = []
        logging.disable(logging.INFO if quiet else logging.NOTSET)
        try:
            for options in _each(given, first, which):
                try:
                    report = step(**options)
                except (CheckpointError, OSError) as error:  # the next checkpoint of the run may be whole
                    exit_codes.append(_told(error, name, extra, verbose))
                    continue
                if not quiet and show and not json:
                    show(report)
                elif not quiet:
                    typer.echo(dumps(report.as_dict()) if json else report_text(report))
        except (CheckpointError, OSError, ModuleNotFoundError, KeyboardInterrupt) as error:
            exit_codes.append(_told(error, name, extra, verbose))
        if exit_codes:
            raise typer.Exit(exit_codes[0])

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, keyword, default=None if name == "which" else False, annotation=annotation)
        for name, annotation in common.items()
    ]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more], return_annotation=None
    )
    command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}  # type: ignore[attr-defined]
    app.command(name, help=inspect.getdoc(step))(command)


def _told(error: BaseException, command: str, extra: str, verbose: bool) -> int:
    """Print an error that is the user's to mend and return the exit code; raises any other again."""
    if verbose:
        traceback.print_exc()
    message, exit_code = _explained(error, command, extra)
    typer.echo(message, err=True)
    return exit_code


def _explained(error: BaseException, command: str, extra: str) -> tuple[str, int]:
    """What to print for an error that is the user's to mend, and the exit code; raises any other again."""
    if isinstance(error, CheckpointError):
        return "\n".join(f"{error.label}: {line}" for line in str(error).splitlines()), error.exit_code
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in {"", "tools"}:
        return f"error: tools {command} needs {error.name}; pip install 'burnish[{extra}]'", 1
    if isinstance(error, OSError):
        what = error.strerror.lower() if error.strerror else str(error).partition("\n")[0]
        return f"error: {printable(f'{error.filename or command}: {what}')}", 1
    if isinstance(error, KeyboardInterrupt):
        return "error: interrupted; nothing is lost", 130
    raise error


def _each(params: dict[str, Any], argument: str, which: str | None) -> list[dict[str, Any]]:
    """The parameters for each checkpoint that --checkpoint chooses; an --output then gets a folder for each."""
    if which is None:
        return [params]
    run = Path(params[argument])
    found = checkpoints_in(run) if run.is_dir() else ()
    number = which.removeprefix("checkpoint-")
    numbered = tuple(p for p in found if number.isdecimal() and int(p.name.removeprefix("checkpoint-")) == int(number))
    chosen = {"all": found, "last": found[-1:]}.get(which, numbered)
    if not chosen:
        names = ", ".join(path.name for path in found) or "no checkpoints"
        raise CheckpointError(run, f"has no checkpoint {which}: there are {names}", "say last, all or a number")
    if len(chosen) == 1 or not params.get("output"):
        return [params | {argument: path} for path in chosen]
    return [params | {argument: path, "output": params["output"] / path.name} for path in chosen]


def report_text(report: Report) -> str:
    """A report for people: what was done on the first line, what is worth knowing below it."""
    lines = [f"{report.path}: {report.summary}"]
    if report.changed:
        done = (("wrote", report.written), ("edited the header of", report.edited), ("removed", report.removed))
        what = "; ".join(f"{verb} {', '.join(names)}" for verb, names in done if names)
        cost = [f"{report.bytes_written:,} bytes"] if report.bytes_written else []
        lines.append(f"  {what or report.step} ({', '.join([*cost, f'{report.seconds:g} s'])})")
    return "\n".join(map(printable, [*lines, *_details(report.details, "  ")]))


def _details(value: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{indent}{key}:", *_details(item, indent + "  ")]
        elif isinstance(item, (list, tuple)):
            shown = [", ".join(f"{k} {v}" for k, v in i.items()) if isinstance(i, dict) else str(i) for i in item]
            lines.append(f"{indent}{key}: {', '.join(shown)}")
        else:
            lines.append(f"{indent}{key}: {item}")
    return lines


def train(
    config: Annotated[Path, typer.Argument(help="YAML or JSON file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print every value and where it came from, as YAML, and train nothing.")
    ] = False,
) -> Report:
    """Train a model as CONFIG says: supervised fine-tuning or a reward model, resumed if it was interrupted.

    Example: tools train examples/sft.yaml training.max_steps=100 finetuning.r=16
    """
    if show:
        from tools.training.show import as_yaml, shown

        with redirect_stdout(sys.stderr):  # libraries greet on import
            groups = shown(config, overrides or ())
        typer.echo(as_yaml(groups))
        raise typer.Exit
    from tools.training.ranks import of_rank, rank
    from tools.training.stderr import log_to_stderr
    from tools.training.train import train as run

    log_to_stderr()
    with redirect_stdout(sys.stderr):
        try:
            report = run(config, overrides or ())
        except CheckpointError as error:
            raise of_rank(error, rank()) from error
    if rank():  # of several that torchrun has started, the first prints the report
        raise typer.Exit
    return report


def preview(
    config: Annotated[Path, typer.Argument(help="YAML or JSON file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file.")
    ] = None,
    *,
    batches: Annotated[int, typer.Option("--batches", metavar="N", help="How many batches are shown.")] = 1,
) -> Report:
    """Show what training by CONFIG would do: batches as the model sees them, what is trained, memory and steps.

    Masked tokens are dim on a terminal and in «» elsewhere. No weights are loaded.
    """
    from tools.training.preview import preview as look
    from tools.training.stderr import log_to_stderr

    log_to_stderr()
    with redirect_stdout(sys.stderr):
        return look(config, overrides or (), batches=batches)


def _print_preview(report: Report) -> None:
    from tools.training.preview import print_preview

    print_preview(report)


for _step in STEPS:
    add_command(_step, takes_checkpoint=_step not in TAKES_RUN)
add_command(train, takes_checkpoint=False, extra="train")
add_command(preview, takes_checkpoint=False, extra="train", show=_print_preview)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the `tools` command."""
    app()
