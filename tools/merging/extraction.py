"""The plan of an extraction: an adapter that makes of a base nearly what a full fine-tune made of it."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Change, Computed, Source, Stored, TensorFile, json_file
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.finding import architectures_of
from tools.lora.adapters import PREFIX
from tools.lora.svd import low_rank
from tools.merging.base import Base
from tools.merging.changes import stores_transposed
from tools.merging.difference import Difference, difference
from tools.merging.floats import matrix
from tools.merging.stored_rows import finite

if TYPE_CHECKING:
    from tools.lora.svd import Matrix

_TASKS = {
    **{"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"},
    **{"ForTokenClassification": "TOKEN_CLS", "ForConditionalGeneration": "SEQ_2_SEQ_LM"},
}
# By module: the squared norms of what is missing and of the whole difference.
Errors = dict[str, tuple[float, float]]


def extract_plan(
    tuned: Base, base: Base, base_name: str, rank: int, errors: Errors, show: Callable[[int, int], None]
) -> Change:
    """The change that makes the directory of a full fine-tune an adapter; `errors` are filled in as it is written.

    `base_name` is what the adapter calls its base. No rank is greater than the greatest a layer can have. Raises
    CheckpointError for a difference that no adapter can hold.
    """
    found = difference(tuned, base)
    if not found.linear:
        problem = f"no linear layer differs from {base.path}, and an adapter without LoRA does not load"
        raise CheckpointError(tuned.path, problem, "use the fine-tuned model itself")
    rank = min(rank, max(min(now.shape) for now, _ in found.linear.values()))
    total = sum(source.nbytes for source, _ in found.linear.values())
    done = 0

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        show(done, total)

    tensors: dict[str, Source] = {}
    for name, (now, before) in found.linear.items():
        module = name.removesuffix(".weight")
        transposed = stores_transposed(base.config, now)
        pair = _Pair(module, now, before, rank, transposed, errors, told)
        tensors |= {f"{PREFIX}{module}.lora_{factor}.weight": pair.tensor(factor) for factor in "AB"}
    for name, source in {**found.saved, **found.biases}.items():
        owner, _, last = name.rpartition(".")
        layer = ".base_layer" if f"{owner}.weight" in found.linear else ""
        tensors[f"{PREFIX}{owner}{layer}.{last}"] = finite(source)
    changed = {*found.linear, *found.saved, *found.biases}
    files = {
        **dict.fromkeys(_left_behind(tuned.checkpoint)),
        "adapter_model.safetensors": TensorFile(tensors),
        "adapter_config.json": json_file(_config(found, tuned, base, base_name, rank)),
    }
    parts = [f"{len(found.linear)} linear layers as LoRA of rank {rank}"]
    parts += [f"{len(found.modules)} modules whole"] if found.modules else []
    parts += [f"{len(found.biases)} biases"] if found.biases else []
    details = {"base": base_name, **({"saved whole": found.modules} if found.modules else {})}
    return Change("; ".join(parts), files, details, frozenset(tuned.tensors.keys() - changed))


class _Pair:
    """The factors of one difference, computed together when the first of them is written."""

    def __init__(
        self,
        module: str,
        now: Stored,
        before: Stored,
        rank: int,
        transposed: bool,
        errors: Errors,
        show: Callable[[int], None],
    ) -> None:
        self.module, self.now, self.before, self.rank, self.transposed = module, now, before, rank, transposed
        self.errors, self.show = errors, show
        self.waiting: dict[str, Matrix] = {}

    def tensor(self, factor: str) -> Computed:
        """A [rank, in] or B [out, rank], in float32."""
        outputs, inputs = self.now.shape[::-1] if self.transposed else self.now.shape
        shape = (self.rank, inputs) if factor == "A" else (outputs, self.rank)
        nbytes = 4 * shape[0] * shape[1]
        return Computed("F32", shape, nbytes, lambda: self._blocks(factor), (self.now, self.before))

    def _blocks(self, factor: str) -> Iterator[bytes]:
        if factor not in self.waiting:
            self._compute()
        yield self.waiting.pop(factor).tobytes()

    def _compute(self) -> None:
        import numpy as np

        delta = matrix(self.now) - matrix(self.before)
        delta = np.ascontiguousarray(delta.T) if self.transposed else delta
        self.waiting["B"], self.waiting["A"] = low_rank(delta, self.rank)
        whole = float(np.square(delta, dtype=np.float64).sum())
        delta -= self.waiting["B"] @ self.waiting["A"]
        self.errors[self.module] = float(np.square(delta, dtype=np.float64).sum()), whole
        self.show(self.now.nbytes)


def _config(found: Difference, tuned: Base, base: Base, base_name: str, rank: int) -> dict[str, Any]:
    """The LoraConfig (PEFT 0.21) of the factors; with alpha = r they are added as they are."""
    modules = [name.removesuffix(".weight") for name in found.linear]
    kind = next(
        (task for name in architectures_of(tuned.config) for end, task in _TASKS.items() if name.endswith(end)), None
    )
    return {
        "peft_type": "LORA",
        "task_type": kind,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": _short(modules, tuned.tensors),
        "modules_to_save": found.modules or None,
        "bias": found.bias,
        "fan_in_fan_out": any(stores_transposed(base.config, now) for now, _ in found.linear.values()),
        "init_lora_weights": True,
    }


def _short(modules: list[str], tensors: Mapping[str, Stored]) -> list[str]:
    """The last components of these modules, when no other module has such a one; else their full names."""
    last = sorted({module.rpartition(".")[2] for module in modules})
    every = {n.removesuffix(".weight") for n in tensors if n.endswith(".weight") and n.split(".")[-2] in last}
    return last if every == set(modules) else sorted(modules)


def _left_behind(tuned: Checkpoint) -> list[str]:
    """The files that make the directory a whole model."""
    model = tuned.model
    weights = [*(file.name for file in model.files), model.index_name] if model else []
    names = (*weights, "config.json", "generation_config.json", "README.md")
    return [name for name in names if (tuned.path / name).exists()]
