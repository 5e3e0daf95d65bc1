"""Actor and critic of a PPO trainer: split into two models that load on their own."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tools.checkpoint.change import Change
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report, joined
from tools.checkpoint.rewrite import rewrite
from tools.postprocess.options import CheckpointDir, DryRun, NewDir, Overwrite


def split_actor_critic(
    checkpoint: CheckpointDir,
    *,
    output: NewDir,
    critic_config: Annotated[
        Path | None,
        typer.Option(help="The model whose config.json describes the critic, where it is not built as the policy is."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Split a PPO checkpoint that holds policy and value model together into OUTPUT/policy and OUTPUT/critic.

    The policy keeps its configuration, tokenizer and every other file; the critic becomes a sequence classifier with
    one label. Both load in transformers, as safetensors in the shards they came in. Reads the names of TRL's wrapper
    (policy, value_model, critic_backbone), as torch, safetensors and accelerate save it. Tensors are copied as bytes.

    Example: tools split-actor-critic runs/ppo/checkpoint-500 -o runs/ppo/split
    """
    from tools.heads.splitting import split_plans

    started = time.perf_counter()
    output = output.expanduser()
    opened = Checkpoint.open(checkpoint)
    changes = split_plans(opened, critic_config)  # whatever is refused is so before a byte is written
    described = {"critic_config": os.path.relpath(critic_config, checkpoint)} if critic_config else {}

    def plan(source: Checkpoint, part: str) -> Change:
        return changes[part] if source.generation == opened.generation else split_plans(source, critic_config)[part]

    reports = {
        part: rewrite(
            "split-actor-critic",
            checkpoint,
            partial(plan, part=part),
            output=output / part,
            overwrite=overwrite,
            dry_run=dry_run,
            options={"part": part, **(described if part == "critic" else {})},
        )
        for part in changes
    }
    return _one_report(output, reports, time.perf_counter() - started)


def _one_report(output: Path, reports: Mapping[str, Report], seconds: float) -> Report:
    both = joined(output, tuple(reports.values()), seconds)
    summary = "; ".join(dict.fromkeys(report.summary for report in reports.values()))
    if len(reports) == 1:
        (only,) = reports
        summary += f" (no {'policy' if only == 'critic' else 'value model'} was saved here)"
    return replace(
        both, summary=summary, details={part: report.details for part, report in reports.items() if report.details}
    )
