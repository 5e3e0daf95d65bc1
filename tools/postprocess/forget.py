"""What undo keeps, freed."""

import shutil

from tools.checkpoint import journal
from tools.checkpoint.files import fsync_folder
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.receipts import FOLDER
from tools.checkpoint.report import Report, size_text
from tools.checkpoint.undo import kept_bytes, standing
from tools.postprocess.options import CheckpointDir


def forget(checkpoint: CheckpointDir) -> Report:
    """Free the disk space that undo keeps; the steps before can then no longer be taken back.

    Example: tools forget runs/ppo/checkpoint-500
    """
    path = Checkpoint.open(checkpoint, accept_run=True).path
    if not any(kept_bytes(path, receipt) is not None for receipt in standing(path)):
        return Report("forget", str(checkpoint), changed=False, summary="undo keeps nothing; nothing to do")
    with journal.lock(path):
        journal.finish(path)
        freed = sum(kept_bytes(path, receipt) or 0 for receipt in standing(path))
        folder = path / FOLDER
        (folder / "undo").rename(folder / "stage")  # a stage without a record goes, whatever happens from here on
        fsync_folder(folder)
        shutil.rmtree(folder / "stage")
    return Report("forget", str(checkpoint), changed=True, summary=f"freed {size_text(freed)}")
