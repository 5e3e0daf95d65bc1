"""SaveProcessorCallback: a checkpoint has its tokenizer and processor; and no tracker is needed to import callbacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from plain_trainer import Flat, decoder, trainer
from tokenizers import Tokenizer, models
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizer,
)

from tools.training import callbacks
from tools.training.callbacks import SaveProcessorCallback

VOCABULARY = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(VOCABULARY, "a")), pad_token="<pad>")


def processor() -> WhisperProcessor:
    """A tokenizer and a feature extractor, which need neither images nor a vocabulary from elsewhere."""
    return WhisperProcessor(WhisperFeatureExtractor(feature_size=8), WhisperTokenizer(vocab=VOCABULARY, merges=[]))


@pytest.mark.parametrize(("build", "auto"), [(tokenizer, AutoTokenizer), (processor, AutoProcessor)])
def test_a4_every_checkpoint_and_the_final_model_have_it(build: type, auto: type, tiny: Path, tmp_path: Path) -> None:
    saved = build()
    running = trainer(Flat(decoder(tiny)), tmp_path, [SaveProcessorCallback(saved)])
    running.train()
    for folder in (tmp_path / "checkpoint-2", tmp_path / "checkpoint-4", tmp_path):
        found = auto.from_pretrained(folder)
        assert type(found) is type(saved)
        assert (folder / "tokenizer_config.json").exists()


def test_the_other_processes_write_nothing(tiny: Path, tmp_path: Path) -> None:
    running = trainer(Flat(decoder(tiny)), tmp_path, [])
    running.state.is_world_process_zero = False
    callback = SaveProcessorCallback(tokenizer())
    callback.on_save(running.args, running.state, running.control)
    callback.on_train_end(running.args, running.state, running.control)
    assert not list(tmp_path.rglob("tokenizer*"))


def test_a7_callbacks_are_imported_without_any_tracker() -> None:
    absent = ["wandb", "swanlab", "trackio", "mlflow", "tensorboard"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    code += "import tools.training.callbacks as callbacks\nassert 'torch' not in sys.modules\n"
    code += "assert all(getattr(callbacks, name) for name in callbacks.__all__)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        callbacks.Other  # noqa: B018
