# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""NonFiniteCallback: a loss that is no number ends the training before it reaches the weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training.ranks import Peers, peers

FOLDER = "non_finite"
FINE, GRADIENT, LOSS = 0, 1, 2  # what a step shows in one process; in several, what says most counts
Batch = dict[str, Any]


class NonFiniteCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Raises CheckpointError when the loss or the gradient of a step is NaN or infinite, before the optimizer uses it.

    The tensors of the batch are then in `non_finite/step-N-batch-M.safetensors` of the output directory, M counting the
    batches of a step from 1. When the loss itself was finite, or computed outside of the model, every batch of the step
    is kept. With fp16 training, whose scaling makes infinite gradients on purpose, only the loss is checked.

    The loss is looked at when the Trainer has waited for it anyway. `close` takes the hook off the model.

    In several processes each keeps its own batch, its number in the name, and all end with the same error: they are
    told of each other at the end of the step, and wait for each other for up to `timeout_s`.
    """

    def __init__(self, timeout_s: float = 1800) -> None:
        self.timeout_s = timeout_s
        self._peers: Peers | None = None
        self._found: CheckpointError | None = None
        self._batches: list[Batch] = []
        self._results: list[Any] = []
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.close()
        self._peers = peers(Path(args.output_dir), self.timeout_s)
        self._hook = model.register_forward_hook(self._note, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._batches, self._results, self._found = [], [], None

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._found = self._found or self._bad_loss(args, state.global_step + 1)
        if self._found and self._is_alone:
            raise self._found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert self._peers is not None
        step = state.global_step + 1
        found = self._found or self._bad_loss(args, step)
        kind = LOSS if found else FINE
        if not found and not args.fp16:
            found = self._bad_gradient(args, step, model)
            kind = GRADIENT if found else FINE
        worst = self._peers.largest(kind, f"the gradients of step {step}")
        if worst == FINE:
            return
        told = self._peers.gathered(found if kind == worst else None, f"the gradients of step {step}")
        raise next(error for error in told if error)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and of the last batches."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._batches, self._results = None, [], []

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: Batch, output: Any) -> None:
        if model.training:
            self._batches.append({**{f"argument_{n}": value for n, value in enumerate(args)}, **kwargs})
            self._results.append(_result(output))

    @property
    def _is_alone(self) -> bool:
        return self._peers is None or self._peers.group is None

    def _bad_loss(self, args: Any, step: int) -> CheckpointError | None:
        """Only the newest is looked at: those before were in their turn."""
        result = self._results[-1] if self._results else None
        if result is None or torch.isfinite(result).all():
            return None
        number = len(self._results)
        what = f"the loss of step {step} is {result.item()}" if result.numel() == 1 else f"step {step} gives no number"
        return _refused(args, what, [_save(args, step, number, self._batches[-1])])

    def _bad_gradient(self, args: Any, step: int, model: Any) -> CheckpointError | None:
        """A loss that is no number spoils every gradient, so the first is enough."""
        named = ((name, one.grad) for name, one in model.named_parameters() if one.grad is not None)
        name, gradient = next(named, ("", None))
        if gradient is None or torch.isfinite(gradient).all():
            return None
        where = [_save(args, step, number, batch) for number, batch in enumerate(self._batches, 1)]
        return _refused(args, f"the gradient of {name} in step {step} is not finite", where)


def _result(output: Any) -> Any:
    """The loss where the model computes it, else what it gives first: logits or scores."""
    if not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        output = output[0] if loss is None else loss
    return output.detach() if isinstance(output, torch.Tensor) else None


def _save(args: Any, step: int, number: int, batch: Batch) -> Path:
    process = f"-process-{args.process_index}" if args.world_size > 1 else ""
    path = Path(args.output_dir) / FOLDER / f"step-{step}-batch-{number}{process}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in batch.items() if torch.is_tensor(value)}
    save_file(tensors, path, metadata={"step": str(step), "batch": str(number)})
    return path


def _refused(args: Any, what: str, where: list[Path]) -> CheckpointError:
    kept = ", ".join(path.name for path in where)
    return CheckpointError(
        Path(args.output_dir) / FOLDER,
        f"{what}; training ended before it reached the weights, and the batch is in {kept or 'none'}",
        "look at the rows, lower training.learning_rate, or train in bfloat16 or float32",
    )
