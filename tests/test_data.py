"""Rows become tokens, and only the assistant's tokens are learnt."""

import csv
import json

import pytest
from conversations import BRACKETS, learnt, only, said

from tools.checkpoint.errors import CheckpointError
from tools.training.config import DataArguments
from tools.training.data import load_preferences, load_sft

ANSWER = " Grüße, 你好 🙂\n\nA second  paragraph.\n"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": said("q", ANSWER)}, f"{ANSWER}<|im_end|>"),
        ({"messages": [{"role": "system", "content": "s"}, *said("q", "a")]}, "a<|im_end|>"),
        ({"messages": said("q", "first", "r", "second")}, "first<|im_end|>second<|im_end|>"),
        ({"messages": said("q", "first", "r")}, "first<|im_end|>"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "a<|im_end|>"),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "a<|im_end|>",
        ),
        ({"instruction": "add", "input": "1 2", "output": "3"}, "3<|im_end|>"),
        ({"instruction": "add", "output": "3", "history": [["q", "a"]], "input": None}, "a<|im_end|>3<|im_end|>"),
        ({"prompt": "2 + 2 =", "completion": " 4"}, " 4<|im_end|>"),
        ({"prompt": said("q"), "completion": said("q", "a")[1:]}, "a<|im_end|>"),
        ({"text": "all of it"}, "all of it<|im_end|>"),
    ],
)
def test_exactly_what_the_assistant_says_is_learnt(tokenizer, write, row, expected):
    assert learnt(only(load_sft(write(row), tokenizer)), tokenizer) == expected


def test_what_is_learnt_is_the_token_itself_and_the_columns_have_one_length(tokenizer, write):
    row = only(load_sft(write({"messages": said("q", ANSWER)}), tokenizer))
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert row["attention_mask"] == [1] * len(row["input_ids"])


def test_the_tokens_are_those_of_the_chat_template(tokenizer, write):
    messages = said("q", "a", "r", ANSWER)
    row = only(load_sft(write({"messages": messages}), tokenizer))
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == rendered.removesuffix("\n")
    assert "Be brief." in rendered


def test_a_system_text_of_the_row_reaches_the_model(tokenizer, write):
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "Rhyme."}
    text = tokenizer.decode(only(load_sft(write(row), tokenizer))["input_ids"])
    assert "Rhyme." in text
    assert "Be brief." not in text


def test_instruction_and_input_are_one_message(tokenizer, write):
    row = only(load_sft(write({"instruction": "add", "input": "1 2", "output": "3"}), tokenizer))
    assert "<|im_start|>user\nadd\n1 2<|im_end|>" in tokenizer.decode(row["input_ids"])


def test_a_template_without_headers_is_masked_as_well(tokenizer, write):
    tokenizer.chat_template = BRACKETS
    row = only(load_sft(write({"messages": said("q", "first", "r", "second")}), tokenizer))
    assert learnt(row, tokenizer) == " first<|im_end|> second<|im_end|>"
    assert row["input_ids"][0] == tokenizer.bos_token_id


def test_a_conversation_that_the_template_refuses_is_named(tokenizer, write):
    tokenizer.chat_template = BRACKETS
    data = write({"messages": said("q", "a")}, {"messages": [{"role": "system", "content": "s"}, *said("q", "a")]})
    with pytest.raises(CheckpointError, match=r"rows\.jsonl:2: the chat template cannot render it: no system"):
        load_sft(data, tokenizer)


def test_without_a_template_instructions_take_the_alpaca_form(tokenizer, write):
    tokenizer.chat_template = None
    row = only(load_sft(write({"instruction": "Add.", "input": "1 2", "output": "3"}), tokenizer))
    text = tokenizer.decode(row["input_ids"])
    assert text.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|im_end|>")
    assert learnt(row, tokenizer) == "3<|im_end|>"


def test_without_a_template_messages_are_refused(tokenizer, write):
    tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match=r"rows\.jsonl:1: has messages, but the tokenizer has no chat template"):
        load_sft(write({"messages": said("q", "a")}), tokenizer)


def test_plain_text_begins_as_the_tokenizer_begins_it(tokenizer, write):
    from tokenizers.processors import TemplateProcessing

    data = write({"text": "abc"})
    assert only(load_sft(data, tokenizer))["input_ids"][0] != tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer.decode(only(load_sft(data, tokenizer))["input_ids"]) == "<s>abc<|im_end|>"


def test_the_end_is_learnt_once_where_the_row_has_it_already(tokenizer, write):
    for row in ({"text": "abc"}, {"prompt": "abc", "completion": "def"}):
        closed = {**row, list(row)[-1]: f"{list(row.values())[-1]}<|im_end|>"}
        assert only(load_sft(write(row), tokenizer)) == only(load_sft(write(closed), tokenizer))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*said("q", "a"), *said("r", " \n")]},
        {"instruction": "q", "output": ""},
        {"prompt": "q", "completion": ""},
        {"prompt": said("q"), "completion": said("", "")[1:]},
    ],
)
def test_a_row_with_an_empty_answer_is_dropped_and_counted(tokenizer, write, row):
    with pytest.raises(CheckpointError, match="all 1 rows have an empty answer"):
        load_sft(write(row), tokenizer)
    whole = {
        **row,
        **{
            key: said("q", "a") if key == "messages" else "a"
            for key in row
            if key in ("messages", "output", "completion")
        },
    }
    loaded = load_sft(write(row, whole), tokenizer)
    assert (len(loaded.dataset), loaded.dropped) == (1, 1)
    assert "1 rows: dropped, for an answer is empty" in loaded.report


@pytest.mark.parametrize(
    ("chosen", "rejected", "number"),
    [
        (said("q", "a"), said("r", "b"), 1),
        (said("q", "a"), said("q", "a", "r", "b"), 3),
        (said("q", "a", "r", "b"), said("q", "a", "s", "b"), 3),
    ],
)
def test_a_pair_of_different_prompts_is_refused(tokenizer, write, chosen, rejected, number):
    with pytest.raises(CheckpointError, match=f"to different prompts: message {number} differs"):
        load_preferences(write({"chosen": chosen, "rejected": rejected}), tokenizer)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"instruction": "q", "output": "a", "history": 5}, "history is int, not a list; write pairs"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "message 1 of messages has role ['user'] and content"),
        ({"prompt": "q", "chosen": "a", "rejected": said("q", "b")}, "has a text and messages as chosen and rejected"),
    ],
)
def test_a_value_of_another_type_is_refused_at_its_line(tokenizer, write, row, problem):
    load = load_preferences if "chosen" in row else load_sft
    with pytest.raises(CheckpointError) as caught:
        load(write(row), tokenizer)
    assert f":1: {problem}" in str(caught.value)


def test_the_answers_of_a_pair_may_go_on_differently(tokenizer, write):
    pair = {"chosen": said("q", "a", "r", "b"), "rejected": said("q", "c", "s", "d")}
    assert len(load_preferences(write(pair), tokenizer).dataset) == 1


def test_cut_and_dropped_rows_are_counted(tokenizer, write):
    rows = [said("q", "a"), said("q", "word " * 99), said("word " * 99, "a")]
    data = write(*({"messages": messages} for messages in rows), max_length=80)
    tokenised = load_sft(data, tokenizer)
    assert (tokenised.rows, tokenised.cut, tokenised.dropped) == (3, 2, 1)
    assert [len(row["input_ids"]) <= 80 for row in tokenised.dataset] == [True, True]
    assert tokenised.summary.endswith("2 rows, 2 cut to 80 tokens, 1 dropped (no token to learn)")


def test_no_row_left_is_an_error(tokenizer, write):
    with pytest.raises(CheckpointError, match=r"all 1 rows have no token to learn within 20 tokens"):
        load_sft(write({"messages": said("word " * 99, "a")}, max_length=20), tokenizer)


def test_an_empty_file_is_an_error(tokenizer, write):
    with pytest.raises(CheckpointError, match="has no rows"):
        load_sft(write(), tokenizer)


def test_max_samples_takes_the_first_rows(tokenizer, write):
    tokenised = load_sft(write({"text": "one"}, {"text": "two"}, {"broken": 1}, max_samples=2), tokenizer)
    assert [learnt(row, tokenizer) for row in tokenised.dataset] == ["one<|im_end|>", "two<|im_end|>"]


def test_the_evaluation_file_is_read_when_asked_for(tokenizer, write, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"text": "held out"}\n')
    data = write({"text": "train"}, eval_file=tmp_path / "eval.jsonl")
    assert learnt(only(load_sft(data, tokenizer, "eval")), tokenizer) == "held out<|im_end|>"
    with pytest.raises(CheckpointError, match=r"data\.eval_file: is not given"):
        load_sft(write({"text": "train"}), tokenizer, "eval")


FINE = ({"text": "fine"}, {"messages": said("q", "a")}, {"instruction": "q", "output": "a"})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "completion": "a"}, "is a row of prompt/completion, but the rows from"),
        ({"question": "q", "answer": "a"}, "has answer, question; forms are: messages"),
        ([1], "is list, not a row"),
        ({"messages": []}, "messages has no messages"),
        ({"messages": "hi"}, "messages is str, not a list of messages"),
        ({"messages": said("q")}, "has no message of the assistant"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "message 1 of messages has role 'bot'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "content of type list"),
        ({"messages": said("q", "a"), "tools": [{}]}, "has tools"),
        ({"messages": [*said("q"), {"role": "assistant", "content": "", "tool_calls": [1]}]}, "has tool_calls"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history has 'c'"),
        ({"instruction": 1, "output": "b"}, "instruction is int, not text"),
        ({"text": 5}, "text is int, not text"),
    ],
)
def test_a_row_of_another_form_is_refused_at_its_line(tokenizer, write, row, problem):
    fine = next((fine for fine in FINE if isinstance(row, dict) and fine.keys() <= row.keys()), FINE[0])
    data = write(fine, row)
    with pytest.raises(CheckpointError) as caught:
        load_sft(data, tokenizer)
    assert str(caught.value).startswith(f"{data.train_file}:2: ")
    assert problem in str(caught.value)


def in_all_kinds(folder, rows):
    """The same rows in every kind of file that can hold them."""
    import pyarrow
    from pyarrow.parquet import write_table

    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.jsonl").write_text(lines.replace("\n", "\n\n"))
    (folder / "b.json").write_text(lines)
    (folder / "c.json").write_text(json.dumps(rows, indent=1))
    with (folder / "d.csv").open("w", newline="", encoding="utf-8-sig") as stream:
        table = csv.DictWriter(stream, rows[0])
        table.writeheader()
        table.writerows(rows)
    write_table(pyarrow.Table.from_pylist(rows), folder / "e.parquet")
    return sorted(folder.iterdir())


def test_every_kind_of_file_gives_the_same_rows(tokenizer, tmp_path):
    rows = [
        {"instruction": "a, b", "input": "", "output": 'say "c"\nd'},
        {"instruction": "e", "input": "f", "output": "ü"},
    ]
    files = in_all_kinds(tmp_path, rows)
    assert len(files) == 5
    first, *others = (list(load_sft(DataArguments(train_file=file), tokenizer).dataset) for file in files)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("name", "content", "place", "problem"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ":2", "is not valid JSON"),
        ("a.json", b'[{"text": "a"},\n 5]', " row 2", "is int, not a row"),
        ("a.json", b'[{"text": "a"},\n {"text" 5}]', ":2", "is not valid JSON"),
        ("a.csv", b"text\na\nb,c\n", ":3", "has more cells than the header has columns"),
        ("a.parquet", b"PAR1", "", "is not valid parquet"),
        ("a.jsonl", b'{"text": "\xff"}', "", "is not UTF-8 text"),
        ("a.txt", b"a", "", "is no data file; rows are read from .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_broken_file_is_refused_at_its_place(tokenizer, tmp_path, name, content, place, problem):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_sft(DataArguments(train_file=file), tokenizer)
    assert str(caught.value).startswith(f"{file}{place}: {problem}")


def test_a_missing_file_is_not_found(tokenizer, tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.jsonl: not found"):
        load_sft(DataArguments(train_file=tmp_path / "no.jsonl"), tokenizer)


BOTH = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "start"),
    [
        ({"prompt": said("q"), "chosen": said("q", "good")[1:], "rejected": said("q", "bad")[1:]}, BOTH),
        ({"prompt": said("q"), "chosen": "good", "rejected": "bad"}, BOTH),
        ({"prompt": "q", "chosen": said("q", "good"), "rejected": said("q", "bad")}, BOTH),
        ({"prompt": "q", "chosen": said("q", "good")[1:], "rejected": said("q", "bad")[1:]}, BOTH),
        ({"chosen": said("q", "good"), "rejected": said("q", "bad")}, BOTH),
        ({"instruction": "q", "chosen": "good", "rejected": "bad"}, BOTH),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            BOTH,
        ),
        ({"prompt": "q: ", "chosen": "good", "rejected": "bad"}, "q: "),
        ({"chosen": "good", "rejected": "bad"}, ""),
    ],
)
def test_a_pair_is_the_same_question_with_two_answers(tokenizer, write, row, start):
    pair = only(load_preferences(write(row), tokenizer))
    chosen, rejected = (tokenizer.decode(pair[f"{side}_input_ids"]) for side in ("chosen", "rejected"))
    assert chosen.endswith(f"{start}good<|im_end|>")
    assert rejected == chosen.removesuffix("good<|im_end|>") + "bad<|im_end|>"


def test_pairs_that_are_cut_to_the_same_text_are_dropped_and_counted(tokenizer, write):
    same = {"prompt": said("word " * 99), "chosen": "good", "rejected": "bad"}
    fine = {"prompt": said("q"), "chosen": "good", "rejected": "bad"}
    tokenised = load_preferences(write(same, fine, max_length=60), tokenizer)
    assert (tokenised.rows, tokenised.cut, tokenised.dropped) == (2, 1, 1)
    assert "1 dropped (two equal answers)" in tokenised.summary


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "chosen": "a"}, "has chosen, prompt; forms are: prompt/chosen/rejected"),
        ({"prompt": said("q"), "chosen": said("x"), "rejected": "a"}, "chosen ends with a message of the user"),
        ({"prompt": "q", "chosen": 1, "rejected": "a"}, "chosen is int, not a list of messages"),
    ],
)
def test_a_pair_of_another_form_is_refused_at_its_line(tokenizer, write, row, problem):
    with pytest.raises(CheckpointError, match=rf"rows\.jsonl:1: {problem}"):
        load_preferences(write(row), tokenizer)


@pytest.mark.real
def test_a_real_template_with_a_system_text_of_its_own_is_masked(smollm2, write):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    row = only(load_sft(write({"messages": said("q", ANSWER, "r", "b")}), tokenizer))
    assert learnt(row, tokenizer) == f"{ANSWER}<|im_end|>b<|im_end|>"
    assert "SmolLM" in tokenizer.decode(row["input_ids"])
