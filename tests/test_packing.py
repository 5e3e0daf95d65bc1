"""Packing: several rows in one sequence, and each is trained as if it stood alone."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl import SFTConfig

from tools.checkpoint.errors import CheckpointError
from tools.training import document_attention
from tools.training.collate import RowCollator
from tools.training.isolation import isolate
from tools.training.packing import pack
from tools.training.stages import sft

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # large enough for a neighbour to show
}
GROUPED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "gpt2": GPT2Config(**SIZES, n_positions=128, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
    "mistral": MistralConfig(**GROUPED, sliding_window=4),
}


def model_of(name: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation=attention).train()


def row_of(length: int, seed: int, asked: int = 3) -> dict[str, list[int]]:
    """A row of random tokens, of which all but the first `asked` are learnt."""
    tokens = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"input_ids": tokens, "labels": [-100] * asked + tokens[asked:]}


ROWS = [row_of(length, seed) for seed, length in enumerate((5, 12, 4, 9, 7, 16, 6))]
ROWS[3] = row_of(9, 3, asked=0)  # plain text: its first token is learnt of nothing, never of a neighbour


def loss_and_gradients(model: Any, rows: Any, *, single: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """One step as the Trainer does it: the loss is a mean over all the learnt tokens of the batch."""
    batch = RowCollator(0, single=single)(rows)
    learnt = (batch["labels"][:, 1:] != -100).sum()
    loss = model(**batch, num_items_in_batch=learnt, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("single", [False, True], ids=["rows", "single"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_c4_packed_and_padded_give_the_same_loss_and_gradients(name: str, attention: str, single: bool) -> None:
    padded, packed = model_of(name, attention), model_of(name, attention)
    expected_loss, expected = loss_and_gradients(padded, ROWS)
    isolate(packed)
    sequences = pack(ROWS, max_length=20)
    assert max(len(row["seq_lengths"]) for row in sequences) > 1
    assert len({len(row["input_ids"]) for row in sequences}) > 1  # some are padded as well
    loss, gradients = loss_and_gradients(packed, sequences, single=single)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for parameter, gradient in gradients.items():
        error = (gradient - expected[parameter]).norm() / expected[parameter].norm().clamp(min=1e-4)
        assert error < 1e-5, f"{parameter}: {error:.1e}"


def logits_of(model: Any, *rows: Any) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of each of these rows, packed in this order."""
    lengths = [len(row["input_ids"]) for row in rows]
    joined = {name: [token for row in rows for token in row[name]] for name in ("input_ids", "labels")}
    batch = RowCollator(0)([{**joined, "seq_lengths": lengths}])
    with torch.no_grad():
        return list(model(**batch).logits[0].split(lengths))


@pytest.mark.parametrize("name", MODELS)
def test_c4_the_logits_of_a_document_do_not_depend_on_its_neighbour(name: str) -> None:
    model = model_of(name)
    isolate(model)
    row, one, other = ROWS[1], ROWS[0], row_of(5, 99)
    assert torch.equal(logits_of(model, one, row)[1], logits_of(model, other, row)[1])
    assert torch.equal(logits_of(model, row, one)[0], logits_of(model, row, other)[0])
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
    torch.testing.assert_close(logits_of(model, one, row)[1], alone, rtol=1e-5, atol=1e-5)


def test_without_the_isolation_a_neighbour_would_show() -> None:
    model = model_of("llama")
    first, second = (logits_of(model, neighbour, ROWS[1])[1] for neighbour in (ROWS[0], row_of(5, 99)))
    assert (first - second).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), "BloomForCausalLM "),
        (MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2), "MambaForCausalLM "),
    ],
)
def test_a_model_that_cannot_keep_rows_apart_is_refused_by_name(config: Any, problem: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(CheckpointError, match=rf"data\.packing: {problem}.*; train it with data\.packing=false"):
        isolate(model)


@pytest.mark.parametrize("name", MODELS)
def test_attention_stays_inside_the_rows_of_one_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counted(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        lengths.append(query.shape[2])
        return sdpa_attention_forward(module, query, *rest, **options)

    model = model_of(name)
    assert isolate(model)
    monkeypatch.setattr(document_attention, "sdpa_attention_forward", counted)
    loss_and_gradients(model, pack(ROWS, 20), single=True)
    assert sorted(lengths) == sorted(2 * [len(row["input_ids"]) for row in ROWS])


def test_attention_row_by_row_is_not_saved_with_the_model(tmp_path: Any) -> None:
    model = model_of("llama")
    assert isolate(model)
    model.save_pretrained(tmp_path)
    assert "document" not in (tmp_path / "config.json").read_text()


def test_a_model_with_an_adapter_is_isolated(tmp_path: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of("llama"), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).train()
    assert isolate(model)
    row, one, other = ROWS[1], ROWS[0], row_of(5, 99)
    assert torch.equal(logits_of(model, one, row)[1], logits_of(model, other, row)[1])


def test_the_trial_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = model_of("gpt2")
    before = torch.get_rng_state()
    isolate(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 90))
def test_every_row_is_packed_once_and_whole(lengths: list[int], capacity: int) -> None:
    rows = [{"input_ids": [number] * length, "labels": [number] * length} for number, length in enumerate(lengths)]
    packed = pack(rows, capacity)
    seen = []
    for sequence in packed:
        assert len(sequence["input_ids"]) == len(sequence["labels"]) == sum(sequence["seq_lengths"]) <= capacity
        at = 0
        for length in sequence["seq_lengths"]:
            (number,) = set(sequence["input_ids"][at : at + length])
            assert sequence["labels"][at : at + length] == [-100, *[number] * (length - 1)]
            seen.append(number)
            at += length
    assert sorted(seen) == list(range(len(rows)))
    assert len(packed) <= max(1, 2 * sum(lengths) // capacity + 1)
    assert pack(rows, capacity) == packed


def test_the_trainer_counts_tokens_of_packed_rows_and_learns_as_from_padded_ones(tmp_path: Any) -> None:
    """Of one batch with every row: the same loss and the same weights after a step, and padding is not counted."""
    from conversations import byte_tokenizer
    from datasets import Dataset

    tokenizer = byte_tokenizer()
    seen = {}
    for name, rows in {"padded": ROWS, "packed": pack(ROWS, 20)}.items():
        args = SFTConfig(
            output_dir=str(tmp_path / name),
            max_steps=2,
            per_device_train_batch_size=2 if name == "padded" else 1,
            gradient_accumulation_steps=4,
            learning_rate=1e-2,
            optim="sgd",
            logging_steps=1,
            gradient_checkpointing=False,
            include_num_input_tokens_seen="non_padding",
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **sft.DEFAULTS,
        )
        model = model_of("llama")
        trainer = sft.build_trainer(model, args, Dataset.from_list(rows), None, tokenizer, [])
        trainer.train()
        logs = trainer.state.log_history
        losses = [entry["loss"] for entry in logs if "loss" in entry]
        counts = [(entry["num_input_tokens_seen"], entry["num_tokens"]) for entry in logs if "num_tokens" in entry]
        seen[name] = losses, counts, model.state_dict()
    (padded, packed) = seen["padded"], seen["packed"]
    assert packed[0] == pytest.approx(padded[0], rel=1e-4)
    assert packed[1] == padded[1]
    for name, tensor in padded[2].items():
        torch.testing.assert_close(packed[2][name], tensor, rtol=1e-4, atol=1e-6)
