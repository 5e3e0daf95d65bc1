"""The runs of Weights & Biases and the like: which one this process has, what it is told, and how it is found again."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.checkpoint.files import replace_synced

logger = logging.getLogger(__name__)

RUNS_FILE = Path(".burnish") / "trackers.json"  # in the directory of a run: what was sent, and where

Groups = Mapping[str, Any]
Identity = dict[str, Any]


@dataclass(frozen=True)
class Tracker:
    """`current(training arguments)` is what finds the run of this process again, None while it has none; `update` adds
    groups to the run; within `reopened` a run that another process had is the run of this one."""

    current: Callable[[Any], Identity | None]
    update: Callable[[Identity, Groups], None]
    reopened: Callable[[Identity], contextlib.AbstractContextManager[None]]


def reported(run: Path) -> dict[str, Groups]:
    """`arguments` that were sent, and `runs`: the identity in each tracker. A file that is none costs one warning."""
    file = run / RUNS_FILE
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        return {"arguments": dict(written["arguments"]), "runs": {k: dict(v) for k, v in written["runs"].items()}}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn_once(file, f"{type(error).__name__}: {error}")
    return {"arguments": {}, "runs": {}}


@cache
def _warn_once(file: Path, reason: str) -> None:
    logger.warning("%s: does not say where the run was reported (%s); counts as nowhere", file, reason)


def keep_reported(run: Path, arguments: Groups, runs: Groups) -> None:
    """Replace the file that `reported` reads as a whole."""
    replace_synced(run / RUNS_FILE, json.dumps({"arguments": arguments, "runs": runs}, indent=2).encode())


def changes(old: Groups, new: Groups) -> list[str]:
    """`finetuning.r: 4 -> 8` for each value of `old` that `new` changes."""
    before, after = flat(old), flat(new)
    return [f"{key}: {before[key]} -> {after[key]}" for key in after if key in before and before[key] != after[key]]


def flat(groups: Groups, prefix: str = "") -> dict[str, Any]:
    """`{"finetuning": {"r": 8}}` as `{"finetuning.r": 8}`."""
    found: dict[str, Any] = {}
    for key, value in groups.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def go_offline(name: str) -> None:
    """Let a tracker that nobody is logged in to keep its run here, rather than ask for an account."""
    mode = f"{name.upper()}_MODE"
    if mode in os.environ:
        return
    if name == "wandb":
        import wandb

        is_known = wandb.login(prompt=False, verify=False)
    else:
        is_known = "SWANLAB_API_KEY" in os.environ or (Path.home() / ".swanlab" / ".netrc").exists()
    if not is_known:
        os.environ[mode] = "offline"
        logger.info("%s: nobody is logged in, so the run is kept offline; `%s sync` sends it later", name, name)


def _wandb_current(args: Any) -> Identity | None:
    run = import_module("wandb").run
    return run and {"id": run.id, "project": run.project, "entity": run.entity or None}


def _wandb_update(identity: Identity, groups: Groups) -> None:
    config = import_module("wandb").run.config
    for change in changes(config.as_dict(), groups):
        logger.info("wandb: %s", change)
    config.update(dict(groups), allow_val_change=True)


@contextlib.contextmanager
def _wandb_reopened(identity: Identity) -> Iterator[None]:
    go_offline("wandb")
    with import_module("wandb").init(**identity, resume="allow", reinit="finish_previous"):
        yield


def _swanlab_current(args: Any) -> Identity | None:
    swanlab = import_module("swanlab")
    if not swanlab.has_run():
        return None
    run = swanlab.get_run()
    return {"id": run.id, "project": run.path.strip("/").split("/")[1] if run.mode == "online" else args.project}


def _swanlab_update(identity: Identity, groups: Groups) -> None:
    import_module("swanlab").config.update(dict(groups))


@contextlib.contextmanager
def _swanlab_reopened(identity: Identity) -> Iterator[None]:
    go_offline("swanlab")
    swanlab = import_module("swanlab")
    swanlab.init(**identity, resume="allow", reinit=True)
    try:
        yield
    finally:
        swanlab.finish()


def _trackio_current(args: Any) -> Identity | None:
    run = import_module("trackio").context_vars.current_run.get()
    return run and {"name": run.name, "project": run.project}


def _trackio_update(identity: Identity, groups: Groups) -> None:
    import_module("trackio").config.update(dict(groups))


@contextlib.contextmanager
def _trackio_reopened(identity: Identity) -> Iterator[None]:
    trackio = import_module("trackio")
    trackio.init(**identity, resume="allow", embed=False)
    try:
        yield
        trackio.log({"postprocessed": 1})  # trackio sends a config only with a row
    finally:
        trackio.finish()


def _tensorboard_current(args: Any) -> Identity:
    return {"folder": os.environ.get("TENSORBOARD_LOGGING_DIR") or str(Path(args.output_dir) / "runs")}


def _tensorboard_update(identity: Identity, groups: Groups) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(Path(identity["folder"]) / "arguments")) as writer:
        for name, group in groups.items():
            writer.add_text(name, f"```json\n{json.dumps(group, indent=2)}\n```")


def _mlflow_current(args: Any) -> Identity | None:
    mlflow = import_module("mlflow")
    run = mlflow.active_run()
    return run and {"id": run.info.run_id, "uri": mlflow.get_tracking_uri()}


def _mlflow_update(identity: Identity, groups: Groups) -> None:
    """All of it as `arguments.json`; each value as a parameter too, of which MLflow lets none change."""
    client = import_module("mlflow").MlflowClient(identity["uri"])
    client.log_dict(identity["id"], dict(groups), "arguments.json")
    known = client.get_run(identity["id"]).data.params
    for key, value in flat({name: group for name, group in groups.items() if name != "postprocessing"}).items():
        text = str(value)[:500]
        if key not in known:
            client.log_param(identity["id"], key, text)
        elif known[key] != text:
            logger.info("mlflow: %s: %s -> %s, as a tag", key, known[key], text)
            client.set_tag(identity["id"], f"now {key}", text)


def _reached_by_name(identity: Identity) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


TRACKERS = {
    "wandb": Tracker(_wandb_current, _wandb_update, _wandb_reopened),
    "swanlab": Tracker(_swanlab_current, _swanlab_update, _swanlab_reopened),
    "trackio": Tracker(_trackio_current, _trackio_update, _trackio_reopened),
    "tensorboard": Tracker(_tensorboard_current, _tensorboard_update, _reached_by_name),
    "mlflow": Tracker(_mlflow_current, _mlflow_update, _reached_by_name),
}
