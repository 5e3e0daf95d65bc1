"""Proof that a checkpoint is whole: re-opened, compared with its receipts, with another, with the model's logits."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.checkpoint.change import Stored, refuse_ungathered, same_bytes, stored
from tools.checkpoint.errors import CheckpointError, all_of
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.receipts import fingerprint, read_receipts
from tools.checkpoint.report import Report
from tools.heads.wrappers import bare_names
from tools.lora.adapters import changes_base
from tools.postprocess.options import CheckpointDir

_BLOCK_BYTES = 1 << 20
_TOLERANCE = 1e-3


def verify(
    checkpoint: CheckpointDir,
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: refuse NaN and infinity, print the SHA-256 of every file.")
    ] = False,
    against: Annotated[Path | None, typer.Option(help="Compare every tensor, byte by byte, with this one.")] = None,
    logits: Annotated[
        Path | None, typer.Option(help="Compare logits with this checkpoint, or with those that training recorded.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="The base to put CHECKPOINT on, when it is an adapter.")] = None,
    reference_base: Annotated[Path | None, typer.Option(help="The base of the --logits checkpoint.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Compare on the lines of this text file, not on 8 fixed token rows.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest logit difference that passes; default: 0.001, for 16-bit models two roundings of a logit.",
        ),
    ] = None,
) -> Report:
    """Prove that a checkpoint is whole, and on request that it is the same model as another.

    Always: every weight file is re-opened, the index is compared with the shards, names with what a loader looks for,
    and weights that a step wrote with its receipt. Exit code 1 when anything is wrong, each finding on its own line.
    With --logits, a checkpoint of `tools train` stands for the live model, whose logits it recorded when it was saved;
    any other is loaded and run, an adapter on --reference-base as that lies there.

    Example: tools verify runs/sft/finished/checkpoint-500 --logits runs/sft/checkpoint-500
    """
    started = time.perf_counter()
    opened = Checkpoint.open(checkpoint)
    refuse_ungathered(opened)
    if findings := [*_unloadable(opened), *_against_receipts(opened)]:
        raise all_of(findings)
    if logits is None and (base or reference_base or prompts):
        raise CheckpointError(opened.path, "--base, --reference-base and --prompts say how to compare", "add --logits")
    details: dict[str, Any] = {"tensors": sum(len(weights.tensors) for weights in opened.weights)}
    summary = "whole"
    if deep:
        if findings := _non_finite(opened):
            raise all_of(findings)
        details["sha256"] = {file.name: _sha256(file) for file in sorted(opened.path.iterdir()) if file.is_file()}
    if against is not None:
        _compare_tensors(opened, Checkpoint.open(against))
        summary += f"; every tensor equals {against}"
    if logits is not None:
        compared = _compare_logits(opened.path, base, logits, reference_base, prompts, tolerance)
        details["logits"] = compared
        summary += f"; logits within {compared['largest difference']:.3g} of {logits}"
    seconds = round(time.perf_counter() - started, 3)
    return Report("verify", str(checkpoint), changed=False, summary=summary, details=details, seconds=seconds)


def _unloadable(opened: Checkpoint) -> list[CheckpointError]:
    """What keeps a plain load from giving this model, as far as names tell."""
    if not opened.weights:
        return [CheckpointError(opened.path, "holds no weights", "consolidate it first if it is a sharded state")]
    findings = []
    if opened.kind == "model" and opened.config is None:
        findings.append(CheckpointError(opened.path, "has no config.json", "copy it from the base model"))
    for weights in opened.weights:
        if wrapped := [name for name, bare in bare_names(weights.tensors).items() if name != bare]:
            problem = f"{len(wrapped)} names such as {wrapped[0]} have a wrapper prefix, so loaders find other weights"
            findings.append(CheckpointError(opened.path / weights.name, problem, "run tools fix-valuehead"))
    return findings


def _against_receipts(opened: Checkpoint) -> list[CheckpointError]:
    """Files that are not what the last step that wrote them recorded; times do not count, copies have new ones."""
    recorded = {
        name: (receipt, known) for receipt in read_receipts(opened.path) for name, known in receipt["files"].items()
    }
    findings = []
    for name, (receipt, known) in recorded.items():
        found = fingerprint(opened.path / name)
        one, other = ({key: v for key, v in (each or {}).items() if key != "mtime_ns"} for each in (known, found))
        if one != other:
            what = "is not there" if found is None else "has changed"
            problem = f"{what} since {receipt['step']} wrote it on {receipt['time']}"
            findings.append(CheckpointError(opened.path / name, problem if known else "is here, but was removed"))
    return findings


def _non_finite(opened: Checkpoint) -> list[CheckpointError]:
    """Tensors with a value that is no finite number; those of 8 bits and fewer are not looked at."""
    import numpy as np

    from tools.lora.floats import EPSILON, widened
    from tools.merging.stored_rows import raw_blocks

    return [
        CheckpointError(source.file.path, f"{name} holds NaN or infinity", "the training had diverged")
        for weights in opened.weights
        for name, source in stored(weights).items()
        if source.dtype in EPSILON
        and not all(np.isfinite(widened(raw, source.dtype)).all() for raw in raw_blocks(source, _BLOCK_BYTES))
    ]


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _compare_tensors(opened: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = _tensors(opened), _tensors(other)
    findings = []
    for one, two, path, lacking in ((ours, theirs, other.path, opened.path), (theirs, ours, opened.path, other.path)):
        for part, name in sorted(one.keys() - two.keys()):
            findings.append(CheckpointError(path, f"has no {name} in its {part}, which {lacking} holds"))
    for part, name in sorted(ours.keys() & theirs.keys()):
        if not same_bytes(ours[part, name], theirs[part, name]):
            one_text, two_text = (f"{each[part, name].dtype} {list(each[part, name].shape)}" for each in (ours, theirs))
            how = "other values than" if one_text == two_text else f"{one_text}, not {two_text} as"
            findings.append(CheckpointError(ours[part, name].file.path, f"{name} has {how} in {other.path}"))
    if findings:
        more = len(findings) - 10
        rest = [CheckpointError(opened.path, f"{more} more tensors differ")] if more > 0 else []
        raise all_of([*findings[:10], *rest])


def _tensors(opened: Checkpoint) -> dict[tuple[str, str], Stored]:
    """Every tensor by the part of the checkpoint that holds it and its name, which another part may hold as well."""
    parts = {"model": opened.model, "adapter": opened.adapter, "head file": opened.head}
    return {
        (part, name): source for part, weights in parts.items() if weights for name, source in stored(weights).items()
    }


def _compare_logits(
    checkpoint: Path,
    base: Path | None,
    reference: Path,
    reference_base: Path | None,
    prompts: Path | None,
    tolerance: float | None,
) -> dict[str, Any]:
    from tools import logits

    recorded = reference / ".burnish" / "trained_logits.safetensors"
    if reference.is_dir() and recorded.is_file() and not (reference_base or prompts):
        reference = recorded
    if reference.is_file():
        if reference_base or prompts:
            problem = "holds logits that were recorded, of rows and of a base of their own"
            raise CheckpointError(reference, problem, "leave --prompts and --reference-base out")
        last, rows = logits.load(reference)
        expected = [row[None] for row in last]
    else:
        if reference_base is None:
            _refuse_changed_base(reference)
        model = logits.load_model(reference, reference_base)
        rows = _rows(model, checkpoint, base, prompts)
        expected = logits.logits(model, rows)
        del model
    ours = logits.load_model(checkpoint, base)
    vocabulary = ours.get_input_embeddings().num_embeddings
    if vocabulary <= max(map(max, rows)):
        raise CheckpointError(checkpoint, f"has {vocabulary} tokens, {reference} has more", "the vocabularies differ")
    found = logits.logits(ours, rows)
    found = [row[-len(wanted) :] for row, wanted in zip(found, expected, strict=True)]
    if found[0].shape != expected[0].shape:
        problem = f"{found[0].shape[-1]} logits a position, {reference} has {expected[0].shape[-1]}"
        raise CheckpointError(checkpoint, problem, "the vocabularies differ")
    for path, rows_of in ((checkpoint, found), (reference, expected)):
        if not all(bool(row.isfinite().all()) for row in rows_of):
            raise CheckpointError(path, "gives logits that are NaN or infinite", "see its tensors: tools verify --deep")
    pairs = list(zip(found, expected, strict=True))
    largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
    limit = _limit(pairs) if tolerance is None else tolerance
    equal = sum(int((one.argmax(-1) == other.argmax(-1)).sum()) for one, other in pairs)
    positions = sum(len(one) for one in found)
    if not largest <= limit:
        problem = f"logits differ from {reference} by up to {largest:.3g}, more than {limit:g}"
        agreement = f"the most likely token agrees at {equal} of {positions} positions"
        init = (Checkpoint.open(checkpoint).adapter_config or {}).get("init_lora_weights")
        remedy = f"; a {init} adapter is right after tools convert-pissa alone" if changes_base(init) else ""
        raise CheckpointError(checkpoint, problem, agreement + remedy)
    agree = f"{equal} of {positions} positions"
    return {"largest difference": largest, "same most likely token": agree, "rows": len(rows), "tolerance": limit}


def _limit(pairs: Sequence[tuple[Any, Any]]) -> float:
    """The largest difference of models that are the same: in 16 bits their roundings alone make them differ."""
    import torch

    coarsest = max(torch.finfo(row.dtype).eps for pair in pairs for row in pair)
    greatest = max(float(row.abs().max()) for pair in pairs for row in pair)
    return max(_TOLERANCE, 2 * coarsest * greatest if coarsest > torch.finfo(torch.float32).eps else 0.0)


def _refuse_changed_base(reference: Path) -> None:
    adapter = Checkpoint.open(reference).adapter_config or {}
    if changes_base(adapter.get("init_lora_weights")):
        problem = (
            f"an adapter for a base that {adapter['init_lora_weights']} has changed; on the original it is no model"
        )
        raise CheckpointError(reference, problem, "give the residual base with --reference-base")


def _rows(model: Any, checkpoint: Path, base: Path | None, prompts: Path | None) -> list[list[int]]:
    from tools import logits

    if prompts is None:
        return logits.fixed_rows(model.get_input_embeddings().num_embeddings)
    from transformers import AutoTokenizer

    if not prompts.is_file():
        raise CheckpointError(prompts, "not found")
    folder = next((f for f in (checkpoint, base) if f and Checkpoint.open(f).processor_files), None)
    if folder is None:
        raise CheckpointError(checkpoint, "has no tokenizer for --prompts", "run tools bundle-processor on it first")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    lines = prompts.read_text(encoding="utf-8", errors="replace").splitlines()
    with logits.loading_as("the tokenizer of --prompts", folder):
        rows = [tokenizer(line)["input_ids"] for line in lines if line.strip()]
    if not rows:
        raise CheckpointError(prompts, "holds no line of text")
    return rows
