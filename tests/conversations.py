"""Conversations in tests: a small tokenizer with a chat template, and what is learnt of a row."""

from functools import cache
from typing import Any

CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A turn is bare text between brackets, as in Mistral's format: no header for the assistant, no line break at the end.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}"
)


@cache
def _trained() -> str:
    """A byte-level BPE tokenizer of 400 entries, trained on this very file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train([__file__], trainer)
    return str(tokenizer.to_str())


def byte_tokenizer() -> Any:
    """A new tokenizer of any text, in ChatML."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML,
    )


def said(*contents: str) -> list[dict[str, str]]:
    """These texts, by user and assistant in turn."""
    return [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * len(contents), contents, strict=False)
    ]


def learnt(row: Any, tokenizer: Any) -> str:
    return tokenizer.decode([token for token in row["labels"] if token != -100])


def only(tokenised: Any) -> Any:
    """The one row of a dataset."""
    (row,) = tokenised.dataset
    return row
