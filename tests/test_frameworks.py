"""Every head of the catalogue: shown, split out, what remains loaded, joined again."""

from pathlib import Path

import pytest
import torch
import transformers
from frameworks import FRAMEWORKS, peft_classifier
from snapshots import state

from tools.checkpoint.change import stored
from tools.checkpoint.layout import Checkpoint
from tools.heads.finding import find_heads
from tools.heads.wrappers import bare_names
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.inspect import inspect
from tools.postprocess.join_valuehead import join_valuehead


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Each tensor of a checkpoint, of its head file too: dtype, shape and bytes."""
    weights = Checkpoint.open(path).weights
    sources = {name: source for each in weights for name, source in stored(each).items()}
    return {name: (source.dtype, source.shape, source.read()) for name, source in sources.items()}


@pytest.fixture(params=FRAMEWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(name: str, tiny: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    FRAMEWORKS[name].build(tiny, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def output(path: Path, loader: str) -> torch.Tensor:
    """Logits or hidden states after a plain load, which must miss nothing and find nothing it does not know."""
    model, loading = getattr(transformers, loader).from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    ids = torch.arange(10)[None]
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(ids, **decoder)[0]


def output_without_head(path: Path, loader: str) -> torch.Tensor:
    """The same of the checkpoint as the framework left it: its wrapper prefix and head taken off in memory."""
    opened = Checkpoint.open(path)
    assert opened.model
    [head] = find_heads(opened.model.tensors, opened.config)
    bare = bare_names(opened.model.tensors)
    state = {}
    for file in opened.model.files:
        found = torch.load(file.path, weights_only=True) if file.path.suffix == ".bin" else None
        state |= found or dict(transformers.modeling_utils.load_state_dict(str(file.path)))
    plain = {bare[n]: t for n, t in state.items() if n not in {**head.names, **head.companions}}
    config = transformers.AutoConfig.from_pretrained(path)
    model = getattr(transformers, loader).from_config(config, dtype=next(iter(plain.values())).dtype)
    own = f"{model.base_model_prefix}." if loader == "AutoModel" else ""
    missing, unexpected = model.load_state_dict({n.removeprefix(own): t for n, t in plain.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    ids = torch.arange(10)[None]
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    model.tie_weights()
    with torch.no_grad():
        return model.eval()(ids, **decoder)[0]


def test_what_remains_is_the_model_without_its_head(name: str, checkpoint: Path) -> None:
    framework = FRAMEWORKS[name]
    expected = output_without_head(checkpoint, framework.loader) if framework.loader else None
    report = fix_valuehead(checkpoint, head=framework.head)
    assert report.changed
    assert framework.named in report.details["head"]["framework"]
    opened = Checkpoint.open(checkpoint)
    assert opened.model
    assert not find_heads(opened.model.tensors, opened.config)
    if expected is not None:
        assert torch.equal(output(checkpoint, framework.loader), expected)
    assert ("AutoModel loads it" in report.summary) == (framework.loader in ("AutoModel", ""))
    before = state(checkpoint)
    for head in (None, framework.head):
        again = fix_valuehead(checkpoint, head=head)
        assert (again.changed, "nothing to do" in again.summary) == (False, True)
    assert state(checkpoint) == before


def test_joined_again_it_is_what_it_was_to_the_byte_of_each_tensor(name: str, checkpoint: Path) -> None:
    framework = FRAMEWORKS[name]
    before = tensors(checkpoint)
    fix_valuehead(checkpoint, head=framework.head)
    split = tensors(checkpoint)
    report = join_valuehead(checkpoint, wrapper=framework.wrapper)
    assert tensors(checkpoint) == before
    assert framework.named in report.details["head"]["framework"]
    assert not join_valuehead(checkpoint, wrapper=framework.wrapper).changed
    again = fix_valuehead(checkpoint, head=framework.head)
    assert tensors(checkpoint) == split
    if Checkpoint.open(checkpoint).model.name == "model.safetensors":  # type: ignore[union-attr]
        assert any(file.startswith("model") for file in again.edited)


def test_inspect_names_framework_keys_shape_and_dtype(name: str, checkpoint: Path) -> None:
    framework = FRAMEWORKS[name]
    opened = Checkpoint.open(checkpoint)
    assert opened.model
    [head] = find_heads(opened.model.tensors, opened.config)
    shown = inspect(checkpoint).details["value head in the weights"]
    assert shown.keys() == head.names.keys()
    for key, text in shown.items():
        tensor = opened.model.tensors[key]
        assert text.startswith(f"{tensor.dtype} {list(tensor.shape)} (")
        assert framework.named in text
    fix_valuehead(checkpoint, head=framework.head)
    details = inspect(checkpoint).details
    assert "value head in the weights" not in details
    assert details["value head in the head file"].keys() == set(head.names.values())


def test_a_declared_head_stays_unless_it_is_named(name: str, checkpoint: Path) -> None:
    if FRAMEWORKS[name].head is None:
        return
    before = state(checkpoint)
    report = fix_valuehead(checkpoint)
    assert not report.changed
    assert f"nothing to do (--head {FRAMEWORKS[name].head} splits it out)" in report.summary
    assert state(checkpoint) == before


def test_the_head_of_an_adapter_belongs_to_it(tiny: Path, tmp_path: Path) -> None:
    peft_classifier(tiny, tmp_path / "adapter")
    before = state(tmp_path / "adapter")
    report = fix_valuehead(tmp_path / "adapter")
    assert report.summary == "base_model.model.score.weight belongs to the adapter; nothing to do"
    [(key, text)] = inspect(tmp_path / "adapter").details["value head in the adapter"].items()
    assert (key, text) == ("base_model.model.score.weight", "F32 [1, 32] (PEFT classifiers; part of the adapter)")
    assert state(tmp_path / "adapter") == before
