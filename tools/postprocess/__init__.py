"""The steps: each a plain function from a checkpoint directory to a Report, one file each."""

from collections.abc import Callable

from tools.checkpoint.report import Report
from tools.postprocess.bundle_processor import bundle_processor
from tools.postprocess.convert_pissa import convert_pissa
from tools.postprocess.export_reward_model import export_reward_model
from tools.postprocess.extract_adapter import extract_adapter
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.forget import forget
from tools.postprocess.history import history
from tools.postprocess.inspect import inspect
from tools.postprocess.join_valuehead import join_valuehead
from tools.postprocess.merge_adapter import merge_adapter
from tools.postprocess.split_actor_critic import split_actor_critic
from tools.postprocess.undo import undo
from tools.postprocess.verify import verify

STEPS: tuple[Callable[..., Report], ...] = (
    fix_valuehead,
    join_valuehead,
    split_actor_critic,
    export_reward_model,
    convert_pissa,
    merge_adapter,
    extract_adapter,
    bundle_processor,
    inspect,
    verify,
    history,
    undo,
    forget,
)
# Those that take a run directory as all its checkpoints.
TAKES_RUN = (bundle_processor, inspect)
