"""Chat templates: whichever renders a conversation, exactly what the assistant says is learnt."""

import sys
from pathlib import Path

import pytest
import trl
from conversations import BRACKETS, CHATML, learnt, only, said

from tools.checkpoint.errors import CheckpointError
from tools.training.data import load_preferences, load_sft
from tools.training.templates import template_names, template_text, use_template

THEIRS = {file.stem: file for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
OURS = template_names()
THOUGHTS = "<think>\nwhy {}\n</think>\n\n"
# Only the last turn shows what it is: the text of a turn changes when another follows, as with Qwen3's thoughts.
UNSTABLE = CHATML.replace(
    "m.content +", "('<think></think>' if loop.last and m.role == 'assistant' else '') + m.content +"
)
FORCED = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
STRIPPED = FORCED.replace("m.content +", "m.content.split('</think>')[-1] +")


def parts(rows, tokenizer, *, is_learnt: bool) -> str:
    """What is learnt of all rows, or what is not."""
    pairs = (pair for row in rows for pair in zip(row["input_ids"], row["labels"], strict=True))
    return tokenizer.decode([token for token, label in pairs if (label == token) == is_learnt])


@pytest.mark.parametrize("thoughts", [False, True], ids=["plain", "thoughts"])
@pytest.mark.parametrize("name", [*OURS, *(f"trl {name}" for name in THEIRS if not name.endswith("_training"))])
def test_c3_any_template_is_masked(tokenizer, write, name, thoughts):
    """Each answer once, with its thoughts if it has some, and nothing that the user says."""
    before = [THOUGHTS.format(turn) if thoughts else "" for turn in ("first", "second")]
    messages = said("ask one", f"{before[0]}answer one", "ask two", f"{before[1]}answer two")
    theirs = name.removeprefix("trl ")
    data = write({"messages": messages}, template=THEIRS[theirs] if theirs != name else name, max_length=4096)
    rows = load_sft(data, tokenizer).dataset
    text = parts(rows, tokenizer, is_learnt=True)
    for answer in ("answer one", "answer two"):
        assert text.count(answer) == 1
    assert text.count("why first") == text.count("why second") == thoughts
    assert "ask" not in text
    assert "ask two" in parts(rows, tokenizer, is_learnt=False)


SAME = {"llama3": "llama3", "gemma": "gemma", "qwen": "qwen2_5", "qwen3": "qwen3", "deepseek_r1": "deepseek_r1_distill"}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(
    "messages",
    [
        said("q"),
        said("q", "a", "r"),
        said("q", " a\n", "r", f"{THOUGHTS}b"),
        said("q", f"{THOUGHTS}a", "r", "b"),
        [{"role": "system", "content": "s"}, *said("q", "a", "r")],
    ],
)
def test_a_template_renders_as_the_one_of_its_models(tokenizer, name, messages):
    if name == "gemma" and messages[0]["role"] == "system":
        pytest.skip("Gemma's own refuses a system text")
    rendered = []
    for template in (name, THEIRS[SAME[name]]):
        use_template(tokenizer, template)
        asks = messages[-1]["role"] == "user"
        rendered.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
    assert rendered[0] == rendered[1]


def test_a_template_that_rewrites_turns_gives_each_a_sequence_of_its_own(tokenizer, write):
    tokenizer.chat_template = UNSTABLE
    messages = said("q", "first", "r", "second")
    tokenised = load_sft(write({"messages": messages}), tokenizer)
    texts = [tokenizer.decode(row["input_ids"]) for row in tokenised.dataset]
    for text, upto in zip(texts, (messages[:2], messages), strict=True):
        assert f"{text}\n" == tokenizer.apply_chat_template(upto, tokenize=False)
    ends = ["<think></think>first<|im_end|>", "<think></think>second<|im_end|>"]
    assert [learnt(row, tokenizer) for row in tokenised.dataset] == ends
    assert tokenised.rows == 1
    assert any(line.startswith("1 rows: the template changes a turn") for line in tokenised.report)
    assert ": 1 rows, 0 cut" in tokenised.summary
    assert "learnt in 2 sequences" in tokenised.report
    assert any("tokens a sequence" in line for line in tokenised.report)


def test_turns_that_are_not_rewritten_share_a_sequence(tokenizer, write):
    """Between two questions Qwen3 keeps what was said: only the turn before the last question reads otherwise."""
    use_template(tokenizer, "qwen3")
    messages = [*said("q", f"{THOUGHTS}a", "r", f"{THOUGHTS}b"), {"role": "assistant", "content": f"{THOUGHTS}c"}]
    rows = load_sft(write({"messages": messages}), tokenizer).dataset
    assert [learnt(row, tokenizer).count("</think>") for row in rows] == [1, 2]


def test_thoughts_that_a_template_leaves_out_are_learnt_behind_the_prompt_for_them(tokenizer, write):
    tokenizer.chat_template = STRIPPED
    tokenised = load_sft(write({"messages": said("q", f"{THOUGHTS}a")}), tokenizer)
    row = only(tokenised)
    assert learnt(row, tokenizer) == THOUGHTS.removeprefix("<think>\n") + "a<|im_end|>"
    prompt = tokenizer.apply_chat_template(said("q"), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row["input_ids"]).startswith(f"{prompt}why")
    assert any("1 rows: the template leaves thoughts out" in line for line in tokenised.report)


def test_an_answer_without_the_thoughts_that_a_template_prompts_for_is_learnt_as_rendered(tokenizer, write):
    tokenizer.chat_template = FORCED
    tokenised = load_sft(write({"messages": said("q", "a", "r", "<div>")}), tokenizer)
    assert learnt(only(tokenised), tokenizer) == "a<|im_end|><div><|im_end|>"
    assert any("prompts otherwise than it renders" in line for line in tokenised.report)


def test_thoughts_in_a_field_of_their_own_are_learnt(tokenizer, write):
    messages = [*said("q"), {"role": "assistant", "content": "a", "reasoning_content": "why"}]
    row = only(load_sft(write({"messages": messages}, template="qwen3"), tokenizer))
    assert learnt(row, tokenizer) == "<think>\nwhy\n</think>\n\na<|im_end|>"


def test_an_assistant_that_speaks_first_is_learnt(tokenizer, write):
    row = only(load_sft(write({"messages": said("", "hello", "q", "a")[1:]}), tokenizer))
    assert learnt(row, tokenizer) == "hello<|im_end|>a<|im_end|>"


def test_a_template_that_closes_no_answer_is_said_to(tokenizer, write):
    tokenizer.chat_template = CHATML.replace("m.content + '<|im_end|>\\n'", "m.content + '\\n'")
    tokenised = load_sft(write({"messages": said("q", "a")}), tokenizer)
    assert any("add eos_token" in line for line in tokenised.report)


@pytest.mark.parametrize("rejected", ["", f"{THOUGHTS}"])
def test_a_template_that_closes_an_empty_answer_is_not_said_to_leave_it_open(tokenizer, write, rejected):
    pairs = load_preferences(write({"prompt": said("q"), "chosen": "a", "rejected": rejected}), tokenizer)
    assert not any("add eos_token" in line for line in pairs.report)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHATML.replace("im_start|>assistant", "answer|>"), "does not begin message 2 as it prompts for it"),
        (CHATML.replace("m.content", "m.parts|default('')"), "leaves out the text of message 2"),
        (CHATML.replace("m.content", "m.content[:3]"), "leaves out the text of message 2"),
    ],
)
def test_a_template_in_which_the_answer_cannot_be_marked_is_refused(tokenizer, write, template, problem):
    assert template != CHATML
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=rf"rows\.jsonl:1: the chat template {problem}"):
        load_sft(write({"messages": said("q", "first", "r", "second")}), tokenizer)


def test_pairs_end_with_their_answers_whatever_the_template_rewrites(tokenizer, write):
    tokenizer.chat_template = UNSTABLE
    row = {"prompt": said("q", "a", "r"), "chosen": "good", "rejected": "bad"}
    pair = only(load_preferences(write(row), tokenizer))
    assert tokenizer.decode(pair["chosen_input_ids"]).endswith("<think></think>good<|im_end|>")


@pytest.mark.parametrize(
    ("name", "split"), [("chatml", None), ("llama3", "<|eot_id|>, <|start_header_id|>, <|end_header_id|>")]
)
def test_tokens_of_a_template_that_the_tokenizer_has_not_are_named(tokenizer, write, name, split):
    report = load_sft(write({"messages": said("q", "a")}, template=name), tokenizer).report
    named = [line for line in report if line.startswith("the tokenizer splits")]
    assert named == ([f"the tokenizer splits {split}, which the template writes"] if split else [])


def test_a_template_of_a_file_replaces_the_tokenizers_and_is_saved_with_it(tokenizer, write, tmp_path):
    (tmp_path / "mine.jinja").write_text(BRACKETS)
    data = write({"messages": said("q", "a")}, template=str(tmp_path / "mine.jinja"))
    assert tokenizer.decode(only(load_sft(data, tokenizer))["input_ids"]).startswith("<s>[INST] q [/INST]")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == BRACKETS


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with the module `mine`, whose entry points are `burnish.templates`."""

    def install(points: str, module: str) -> None:
        folder = tmp_path / "site"
        (folder / "mine-1.dist-info").mkdir(parents=True)
        (folder / "mine.py").write_text(module)
        (folder / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
        (folder / "mine-1.dist-info" / "entry_points.txt").write_text(f"[burnish.templates]\n{points}\n")
        monkeypatch.syspath_prepend(folder)

    yield install
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    "value", ["'{{ messages[0].content }}'", "__import__('pathlib').Path(__file__).parent / 'a.jinja'"]
)
def test_an_installed_package_adds_a_template(installed, tmp_path, value):
    installed("brackets = mine:TEXT", f"TEXT = {value}")
    (tmp_path / "site" / "a.jinja").write_text("{{ messages[0].content }}")
    assert "brackets" in template_names()
    assert template_text("brackets") == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("points", "asked", "problem"),
    [
        ("brackets = mine:GONE", "brackets", "brackets does not load from mine:GONE"),
        ("brackets = mine:NUMBER", "brackets", "mine:NUMBER is int, not a template"),
        ("chatml = mine:NUMBER", "chatml", "mine:NUMBER is entered under burnish.templates as chatml"),
    ],
)
def test_a_template_of_a_package_that_is_none_is_refused(installed, points, asked, problem):
    installed(points, "NUMBER = 1")
    with pytest.raises(CheckpointError, match=problem):
        template_text(asked)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("chatlm", r"data\.template: there is no template chatlm; did you mean chatml\?"),
        ("nothing-like-it", r"give a \.jinja file, or one of alpaca, chatml"),
        ("gone.jinja", r"gone\.jinja: not found"),
        ("broken.jinja", r"broken\.jinja:2: is not valid Jinja: "),
        ("raises.jinja", r"raises\.jinja: cannot render a question of the user: no"),
        ("binary.jinja", r"binary\.jinja: cannot be read"),
    ],
)
def test_a_template_that_is_missing_or_broken_is_one_line(tokenizer, write, tmp_path, template, problem):
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{% endif %}")
    (tmp_path / "raises.jinja").write_text("{{ raise_exception('no') }}")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    name = str(tmp_path / template) if template.endswith(".jinja") else template
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_sft(write({"messages": said("q", "a")}, template=name), tokenizer)
    assert "\n" not in str(caught.value)


def test_c3_a_template_that_never_prompts_is_told(tokenizer, write, tmp_path):
    silent = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    (tmp_path / "silent.jinja").write_text(silent)
    data = write({"messages": said("q", "a")}, template=tmp_path / "silent.jinja")
    told = "\n".join(load_sft(data, tokenizer).report)
    assert "the template never prompts, so how an answer begins is learnt too" in told
    tokenizer.chat_template = None
    told = "\n".join(load_sft(write({"messages": said("q", "a")}, template="chatml"), tokenizer).report)
    assert "never prompts" not in told


def test_c3_an_empty_template_is_refused(tokenizer, write, tmp_path):
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(CheckpointError, match="is empty"):
        load_sft(write({"messages": said("q", "a")}, template=tmp_path / "empty.jinja"), tokenizer)
