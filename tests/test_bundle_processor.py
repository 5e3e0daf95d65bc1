"""Tokenizer and processor files come along, and nothing else changes."""

import json
from pathlib import Path

import heads
import pytest
from snapshots import contents

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.bundle_processor import bundle_processor

FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json"),
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    for name in FILES:
        (tmp_path / "base" / name).write_bytes(json.dumps({"file": name}).encode() + b"\r\n")
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


def test_tp_01_a_run_and_every_checkpoint_of_it(base: Path, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    checkpoints = [heads.flat(tiny, tmp_path / "run" / name) for name in ("checkpoint-10", "checkpoint-20")]
    (checkpoints[0] / "tokenizer.json").write_text("its own")
    before = contents(tmp_path / "run")
    report = bundle_processor(tmp_path / "run", source=base)
    after = contents(tmp_path / "run")
    assert before.items() <= after.items()
    added = set(FILES) - {"tokenizer.json"}
    assert set(report.written) == after.keys() - before.keys()
    assert after.keys() - before.keys() == {
        *FILES,
        *(f"checkpoint-10/{name}" for name in added),
        *(f"checkpoint-20/{name}" for name in FILES),
    }
    assert all(after[name] == contents(base)[Path(name).name] for name in report.written)
    assert not bundle_processor(tmp_path / "run", source=base).changed
    assert contents(tmp_path / "run") == after


def test_the_base_that_an_adapter_names_is_the_default(base: Path, tmp_path: Path) -> None:
    adapter = Path(__file__).parent / "fixtures" / "trl-valuehead-lora"
    target = tmp_path / "adapter"
    target.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    (target / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    assert set(bundle_processor(target).written) == set(FILES)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "does not say which model it was trained from; name it with --from"),
        ("nowhere", "nowhere: not found"),
        ("checkpoint", "holds no tokenizer or processor file; name another model with --from"),
    ],
)
def test_a_source_that_cannot_serve(source: str | None, message: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=message):
        bundle_processor(path, source=tmp_path / source if source else None)


def test_a_base_that_is_not_here_is_not_asked_of_a_hub(recorded: "object", tmp_path: Path) -> None:
    path = recorded("trl-valuehead-lora")  # type: ignore[operator]
    with pytest.raises(
        CheckpointError,
        match="trained from tiny-llama, which is neither a directory here nor in the hub's cache; name a local",
    ):
        bundle_processor(path)


def test_a_name_of_the_hub_is_found_in_its_cache(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--someone--model"
    (cache / "snapshots").mkdir(parents=True)
    base.rename(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "config.json").write_text("{}")
    assert set(bundle_processor(path, source=Path("someone/model")).written) == set(FILES)


def test_a_full_model_with_a_tokenizer_of_its_own(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    (path / "tokenizer.json").write_text("{}")
    assert bundle_processor(path).summary == "has its own tokenizer or processor; nothing to do"
