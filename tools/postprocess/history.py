"""The steps that changed a checkpoint, and what undo keeps of each."""

from typing import Any

from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.receipts import read_receipts
from tools.checkpoint.report import Report, size_text
from tools.checkpoint.undo import kept_bytes, standing
from tools.postprocess.options import CheckpointDir


def history(checkpoint: CheckpointDir) -> Report:
    """List the steps that changed a checkpoint, with the bytes that undo keeps of each.

    Example: tools history runs/ppo/checkpoint-500
    """
    path = Checkpoint.open(checkpoint, accept_run=True).path
    receipts, holding = read_receipts(path), {receipt["id"] for receipt in standing(path)}
    sizes = {receipt["id"]: kept_bytes(path, receipt) for receipt in receipts}
    shown = {str(receipt["id"]): _entry(receipt, holding, sizes[receipt["id"]]) for receipt in receipts}
    total = sum(size or 0 for size in sizes.values())
    summary = f"{len(receipts)} steps; undo keeps {size_text(total)}" if receipts else "no step has changed it"
    return Report("history", str(checkpoint), changed=False, summary=summary, details=shown)


def _entry(receipt: dict[str, Any], holding: set[int], kept: int | None) -> dict[str, Any]:
    if "undoes" in receipt:
        state = f"took back step {receipt['undoes']}"
    elif receipt["id"] not in holding:
        state = "undone"
    elif "source" in receipt:
        state = f"made from {receipt['source']['path']}"
    else:
        state = "freed; cannot be undone" if kept is None else f"undo keeps {size_text(kept)}"
    options = {"options": receipt["options"]} if receipt.get("options") else {}
    return {
        "step": receipt["step"],
        "time": receipt["time"],
        "state": state,
        **options,
        "files": list(receipt["files"]),
    }
