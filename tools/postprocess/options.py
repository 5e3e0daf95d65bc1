"""The parameters that steps share: one type, one help text each."""

from pathlib import Path
from typing import Annotated

import typer

CheckpointDir = Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)]
OutputDir = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the result here and leave what is there as it is.", show_default=False),
]
NewDir = Annotated[Path, typer.Option("--output", "-o", help="The directory to make.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an --output that exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be written, with bytes, and change nothing.")]
