"""The logits of a causal LM on fixed token rows: what two checkpoints must share to be the same model."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.hub import local_copy

if TYPE_CHECKING:
    import torch

ROWS, LENGTH = 8, 16


def fixed_rows(vocab_size: int) -> list[list[int]]:
    """8 rows of 16 token ids spread over the vocabulary, the same on every machine."""
    return [
        [(7919 * (row * LENGTH + column) + 31 * row) % vocab_size for column in range(LENGTH)] for row in range(ROWS)
    ]


def logits(model: "torch.nn.Module", rows: Sequence[Sequence[int]]) -> "list[torch.Tensor]":
    """For each row of token ids the logits at every position: [length, vocabulary] in the model's dtype, on the CPU.

    The model is put in eval mode for it and back into the mode it was in. Each row is run alone, so none is padded.
    """
    import torch

    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return [model(input_ids=torch.tensor([row], device=device)).logits[0].cpu() for row in rows]
    finally:
        model.train(was_training)


def save(model: "torch.nn.Module", path: Path) -> None:
    """Write a safetensors file: `rows` [8, 16] and `logits` [8, vocabulary], those at the last position of each row."""
    import torch
    from safetensors.torch import save_file

    rows = fixed_rows(model.get_input_embeddings().num_embeddings)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    last = torch.stack([row[-1] for row in logits(model, rows)])
    save_file({"logits": last, "rows": torch.tensor(rows)}, partial)
    partial.replace(path)


def load(path: Path) -> tuple["torch.Tensor", list[list[int]]]:
    """What `save` wrote: the logits and the rows they belong to."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(path, f"not a safetensors file ({error})", "name a checkpoint directory") from error
    if saved.keys() != {"logits", "rows"}:
        raise CheckpointError(path, f"holds {', '.join(saved)}, not logits and rows", "name a checkpoint directory")
    return saved["logits"], saved["rows"].tolist()


def load_model(path: Path, base: Path | None = None) -> Any:
    """The causal LM of a checkpoint in the dtype it is stored in; an adapter is put on `base` or on the base it names.

    The base is taken as it is: an adapter that says `pissa` does not change it again, as a plain load by PEFT would.

    Raises CheckpointError when the files lack a weight of the model (a plain load gives it random values, with a
    warning), or when the tensors of an adapter are not those that its configuration makes.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(path)
    if checkpoint.kind == "adapter":
        return _load_adapter(checkpoint, base)
    if checkpoint.config is None:
        raise CheckpointError(path, "has no config.json", "copy it from the base model")
    return loaded(AutoModelForCausalLM, path, "a causal LM", dtype="auto")


def loaded(auto: Any, path: Path, what: str, *, dtype: Any) -> Any:
    """The model that one of transformers' Auto classes makes of a checkpoint, without random weights."""
    with loading_as(what, path):
        model, loading = auto.from_pretrained(path, dtype=dtype, output_loading_info=True, local_files_only=True)
    if missing := sorted(loading["missing_keys"]):
        problem = f"{len(missing)} weights are missing and would be random: {', '.join(missing[:3])}"
        raise CheckpointError(path, problem, "do the names have a prefix that does not belong there?")
    return model


@contextlib.contextmanager
def loading_as(what: str, path: Path) -> Iterator[None]:
    """Quiet; raises CheckpointError where transformers or PEFT fails, whatever they say of a file nobody wrote."""
    try:
        with quiet():
            yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(path, f"does not load as {what} ({reason})") from error


def _load_adapter(checkpoint: Checkpoint, base: Path | None) -> Any:
    from peft import PeftConfig

    named = base or (checkpoint.adapter_config or {}).get("base_model_name_or_path")
    path = local_copy(named) if named else None
    if path is None:
        raise CheckpointError(checkpoint.path, f"its base, {named}, is not on this machine", "name it with --base")
    model = load_model(path)
    with loading_as("an adapter", checkpoint.path):
        config = PeftConfig.from_pretrained(checkpoint.path)
    config.init_lora_weights = True
    return with_adapter(model, checkpoint, config)


def with_adapter(model: Any, checkpoint: Checkpoint, config: Any, beside: Set[str] = frozenset()) -> Any:
    """The model with the adapter of a checkpoint on it, as `config` (a PeftConfig) has it.

    Raises CheckpointError unless its tensors are those that the configuration makes, and those `beside` them.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with loading_as(f"an adapter on {model.name_or_path}", checkpoint.path):
        model = PeftModel.from_pretrained(model, checkpoint.path, config=config)
    assert checkpoint.adapter is not None
    expected, found = set(get_peft_model_state_dict(model)), checkpoint.adapter.tensors.keys() - beside
    if odd := sorted(expected ^ found):
        raise CheckpointError(checkpoint.path, f"{len(odd)} tensors do not fit its configuration: {', '.join(odd[:3])}")
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, advice and deprecations while a model loads; what matters is checked afterwards."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
