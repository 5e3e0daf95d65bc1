"""A causal LM with a value head as people write it themselves, in a Trainer as it comes."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

H = 32
HEAD_NAMES = {"v_head.summary.weight", "v_head.summary.bias"}


class Summary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.summary = nn.Linear(H, 1)


class Wrapper(nn.Module):
    """A decoder under TRL's names with TRL's head; its own state dict is that of ZeRO-3, all names wrapped."""

    def __init__(self, decoder: Any):
        super().__init__()
        torch.manual_seed(3)
        self.pretrained_model = decoder
        self.v_head = Summary()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.pretrained_model(input_ids, output_hidden_states=True).hidden_states[-1]
        scores = self.v_head.summary(hidden[:, -1]).squeeze(-1)
        return {"loss": (scores - 1).pow(2).mean(), "scores": scores}


class Flat(Wrapper):
    """The state dict of TRL's class: no wrapper before the names, of an adapted model only the head."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        head = {f"v_head.{name}": tensor for name, tensor in self.v_head.state_dict().items()}
        if isinstance(self.pretrained_model, PeftModel):
            return head
        decoder = self.pretrained_model.state_dict()
        if self.pretrained_model.config.tie_word_embeddings:
            del decoder["lm_head.weight"]
        return decoder | head

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        decoder = {name: tensor for name, tensor in state.items() if name not in HEAD_NAMES}
        head = {name.removeprefix("v_head."): state[name] for name in HEAD_NAMES & state.keys()}
        self.v_head.load_state_dict(head, strict=False)
        return self.pretrained_model.load_state_dict(decoder, strict=False)


def decoder(tiny: Path, *, tied: bool = False) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    if not tied:
        return model
    model.config.tie_word_embeddings = True
    torch.manual_seed(0)
    return LlamaForCausalLM(model.config)


def adapted(tiny: Path) -> Any:
    torch.manual_seed(1)
    return get_peft_model(decoder(tiny), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def trainer(
    model: nn.Module, folder: Path, callbacks: list[Any], *, trainer_class: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """Four steps, saved every second one."""
    rows = Dataset.from_list([{"input_ids": [n + 3, n + 4, n + 5], "labels": [n]} for n in range(16)])
    settings = {"max_steps": 4, "save_steps": 2, "seed": 1, "learning_rate": 1e-2, "report_to": "none"}
    sizes = {"per_device_train_batch_size": 2, "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    args = TrainingArguments(output_dir=str(folder), **{**settings, **sizes, **options})
    return trainer_class(model=model, args=args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
