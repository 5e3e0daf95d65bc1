"""Where rows come from: files, directories, saved datasets, the hub; what form they have; how long they are."""

import json
from pathlib import Path

import datasets
import pytest
from conversations import byte_tokenizer, said
from transformers import GPT2Config, LlamaConfig

from tools.checkpoint.errors import CheckpointError
from tools.training.config import DataArguments
from tools.training.data import load_preferences, load_sft
from tools.training.lengths import histogram, require_room
from tools.training.sources import digest, read_source, source_of


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def folder(tmp_path):
    """Rows 0 to 3 in two files and a directory inside, with what holds no rows beside them."""
    (tmp_path / "in").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "0"}\n{"text": "1"}\n')
    (tmp_path / "b.csv").write_text("text\n2\n")
    (tmp_path / "in" / "c.json").write_text('[{"text": "3"}]')
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.jsonl").write_text("broken")
    return tmp_path


def texts(rows):
    return [row.columns["text"] for row in rows]


def test_c2_a_directory_is_read_file_by_file_in_the_order_of_their_names(folder):
    rows = read_source(folder, split="train")
    assert texts(rows) == ["0", "1", "2", "3"]
    assert [row.place for row in rows][1:] == [
        f"{folder}/a.jsonl:2",
        f"{folder}/b.csv:2",
        f"{folder}/in/c.json row 1",
    ]
    assert texts(read_source(folder, split="train", limit=3)) == ["0", "1", "2"]


def test_c2_a_saved_dataset_is_read(tmp_path):
    datasets.Dataset.from_list([{"text": "0"}, {"text": None}]).save_to_disk(tmp_path / "saved")
    rows = read_source(tmp_path / "saved", split="train")
    assert [row.columns for row in rows] == [{"text": "0"}, {}]
    assert rows[1].place == f"{tmp_path / 'saved'} row 2"
    assert digest(tmp_path / "saved") == digest(tmp_path / "saved")


def test_several_splits_are_refused_by_name(tmp_path):
    dataset = datasets.Dataset.from_list([{"text": "0"}])
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"holds several splits \(test, train\); name the directory of one"):
        read_source(tmp_path / "saved", split="train")
    assert texts(read_source(tmp_path / "saved" / "test", split="train")) == ["0"]


def test_a_directory_without_data_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no data file; rows are read from \.jsonl"):
        read_source(tmp_path, split="train")


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "some/rows.jsonl", "./some/rows", "~/rows", "/some/rows", "a/b/c", "rows"]
)
def test_a_local_path_is_never_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked of the hub"))
    source = source_of(name)
    assert isinstance(source, Path)
    with pytest.raises(CheckpointError, match="not found; check the files under data"):
        read_source(source, split="train")


def test_a_path_in_a_directory_that_exists_is_local(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert source_of("data/instructions") == Path("data/instructions")
    assert source_of("owner/instructions") == "owner/instructions"


@pytest.mark.parametrize(("name", "split"), [("owner/name", "validation"), ("owner/name:test[:1%]", "test[:1%]")])
def test_a_name_is_loaded_from_the_hub_with_its_split(monkeypatch, tokenizer, name, split):
    def load_dataset(*asked, **options):
        assert (asked, options) == (("owner/name", "main"), {"split": split})
        return datasets.Dataset.from_list([{"text": "held out"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataArguments(train_file=name, eval_file=name, subset="main")
    assert load_sft(data, tokenizer, "eval").summary.startswith(f"{name}: 1 rows")


def test_a_hub_that_cannot_be_reached_is_one_line(tokenizer):
    """The tests run offline."""
    with pytest.raises(CheckpointError, match="owner/name: is no file here, and does not load from the hub") as caught:
        load_sft(DataArguments(train_file="owner/name"), tokenizer)
    assert "\n" not in str(caught.value)


def test_a_subset_of_a_file_is_refused(folder, tokenizer):
    with pytest.raises(CheckpointError, match=r"data\.subset: is of a dataset on the hub"):
        load_sft(DataArguments(train_file=folder, subset="main"), tokenizer)


def test_the_digest_follows_names_and_contents(folder):
    before = digest(folder)
    (folder / "README.md").write_text("other")
    assert digest(folder) == before
    (folder / "b.csv").rename(folder / "b2.csv")
    renamed = digest(folder)
    (folder / "b2.csv").write_text("text\n4\n")
    assert len({before, renamed, digest(folder), digest(folder / "b2.csv")}) == 4


def rows_in(tmp_path, *rows, **options) -> DataArguments:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataArguments(train_file=file, **options)


ASKED = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "recognised"),
    [
        (
            {"messages": said("q", "a"), "id": 1},
            "read as messages (messages), the tokenizer's own template; not read: id",
        ),
        ({"conversations": said("q", "a"), "system": "s"}, "read as ShareGPT (conversations)"),
        ({"instruction": "q", "output": "a", "history": []}, "read as alpaca (instruction/output)"),
        ({"prompt": "q", "completion": "a"}, "read as prompt and completion (prompt/completion)"),
        (
            {"text": "a", "url": "u", "id": 1},
            "read as plain text (text), the tokenizer's own template; not read: id, url",
        ),
        (ASKED, "read as explicit prompt (prompt/chosen/rejected)"),
        ({"chosen": said("q", "a"), "rejected": said("q", "b")}, "read as implicit prompt (chosen/rejected)"),
        ({"instruction": "q", "chosen": "a", "rejected": "b"}, "read as alpaca (instruction/chosen/rejected)"),
    ],
)
def test_c2_the_form_is_recognised_and_said(tokenizer, tmp_path, row, recognised):
    load = load_preferences if "chosen" in row else load_sft
    assert load(rows_in(tmp_path, row), tokenizer).report[1].startswith(recognised)


def test_rows_of_two_forms_are_refused_with_both_places(tokenizer, tmp_path):
    data = rows_in(tmp_path, {"text": "a"}, {"text": "b"}, {"prompt": "q", "completion": "a"})
    with pytest.raises(CheckpointError) as caught:
        load_sft(data, tokenizer)
    file = data.train_file
    assert str(caught.value) == (
        f"{file}:3: is a row of prompt/completion, but the rows from {file}:1 on are of text; "
        "put rows of one form into one file"
    )


def test_c2_what_was_read_cut_and_dropped_is_reported(tokenizer, tmp_path):
    rows = [said("q", "a"), said("q", "word " * 20), said("q", "word " * 99), said("word " * 99, "a")]
    tokenised = load_sft(rows_in(tmp_path, *({"messages": row} for row in rows), max_length=128), tokenizer)
    first, form, lengths, *bars = tokenised.report
    assert first == f"{tmp_path}/rows.jsonl: 3 rows, 2 cut to 128 tokens, 1 dropped (no token to learn)"
    assert form == "read as messages (messages), the tokenizer's own template"
    assert tokenised.longest == 128
    assert tokenised.place == f"{tmp_path}/rows.jsonl:3"
    assert lengths.endswith(
        f"to 128 tokens a row, {len(tokenised.dataset[1]['input_ids'])} in the middle; the longest is {tokenised.place}"
    )
    assert all("tokens" in bar for bar in bars)


def test_packing_is_reported_and_evaluation_rows_stay_single(tokenizer, tmp_path):
    data = rows_in(tmp_path, *({"text": f"row {n}"} for n in range(20)), max_length=64, packing=True)
    data = data.model_copy(update={"eval_file": data.train_file})
    tokenised = load_sft(data, tokenizer)
    assert sum(len(lengths) for lengths in tokenised.dataset["seq_lengths"]) == 20
    assert tokenised.report[-1].startswith(f"packed into {len(tokenised.dataset)} sequences of 64 tokens, ")
    assert len(load_sft(data, tokenizer, "eval").dataset) == 20


def test_pairs_are_not_packed(tokenizer, tmp_path):
    with pytest.raises(CheckpointError, match=r"data\.packing: packs rows of sft"):
        load_preferences(rows_in(tmp_path, ASKED, packing=True), tokenizer)


def test_the_histogram_counts_every_row_in_few_lines():
    assert histogram([4, 5, 8, 9, 64]) == [
        " 4-6  tokens 2 ##############################",
        " 7-10 tokens 2 ##############################",
        "11-16 tokens 0",
        "17-25 tokens 0",
        "26-40 tokens 0",
        "41-64 tokens 1 ###############",
    ]
    assert histogram([7]) == ["7-7 tokens 1 ##############################"]
    lines = histogram(list(range(1, 100_000, 7)))
    assert len(lines) == 6
    assert sum(int(line.split()[2]) for line in lines) == len(range(1, 100_000, 7))


@pytest.mark.parametrize("config", [LlamaConfig(max_position_embeddings=64), GPT2Config(n_positions=64)])
def test_a_row_longer_than_the_model_is_refused_with_both_numbers(config):
    require_room(64, "rows.jsonl:3", config)
    with pytest.raises(
        CheckpointError, match=r"rows\.jsonl:3: has 65 tokens, but the model has 64 positions; set data"
    ):
        require_room(65, "rows.jsonl:3", config)


def test_a_long_text_fits_in_a_cell(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "a" * 200_000)
    assert [len(text) for text in texts(read_source(tmp_path, split="train"))] == [200_000]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"[" * 100_000, ":1: is nested too deeply"),
        ("a.jsonl", b"", ": has no rows"),
        ("a.csv", b"text\n", ": has no rows"),
        ("a.json", b"[]", ": has no rows"),
        ("a.jsonl", b'{"text": "\\ud800"}', ":1: holds '\\ud800', half a character, which is no text"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', ":1: holds '\\ud800'"),
    ],
)
def test_a_file_that_holds_no_rows_of_text_is_one_line(tokenizer, tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_sft(DataArguments(train_file=tmp_path / name), tokenizer)
    assert str(caught.value).startswith(f"{tmp_path / name}{problem}")
    assert "\n" not in str(caught.value)
