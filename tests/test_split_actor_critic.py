"""Policy and value model leave their wrapper, and each is the same model to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import actor_critic
import pytest
import torch
from loading import loaded
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import build_header, read_header
from tools.postprocess.split_actor_critic import split_actor_critic

IDS = torch.arange(10)[None]
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gpt_neox": {},
    "mistral": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def same_as(wrapper: actor_critic.Wrapper, output: Path) -> None:
    """Weights of the two directories are those of the live modules, to the bit, and so what they compute is too."""
    policy = loaded(AutoModelForCausalLM, output / "policy")
    critic = loaded(AutoModelForSequenceClassification, output / "critic")
    with torch.no_grad():
        torch.testing.assert_close(policy(IDS).logits, wrapper.policy(IDS).logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(critic(IDS).logits, wrapper.value_model(IDS).logits, rtol=0, atol=1e-6)
        hidden = getattr(critic, critic.base_model_prefix)(IDS).last_hidden_state
        torch.testing.assert_close(critic.score(hidden), wrapper.values, rtol=0, atol=1e-6)
    for ours, theirs in ((policy, wrapper.policy), (critic, wrapper.value_model)):
        expected = theirs.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
    assert (critic.config.num_labels, critic.config.tie_word_embeddings) == (1, False)


@pytest.mark.parametrize("form", actor_critic.FORMS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_both_models_are_the_live_ones(form: str, tied: bool, tmp_path: Path) -> None:
    wrapper = actor_critic.build(tie_word_embeddings=tied)
    path = actor_critic.FORMS[form](wrapper, tmp_path / "ppo")
    before = state(path)
    report = split_actor_critic(path, output=tmp_path / "split")
    assert report.changed
    assert state(path) == before
    same_as(wrapper, tmp_path / "split")
    policy = loaded(AutoModelForCausalLM, tmp_path / "split/policy")
    assert policy.config.tie_word_embeddings is tied


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["aliased", "gathered"])
def test_every_family_keeps_its_own_prefix(family: str, form: str, tmp_path: Path) -> None:
    wrapper = actor_critic.build(family, **FAMILIES[family])
    path = actor_critic.FORMS[form](wrapper, tmp_path / "ppo")
    split_actor_critic(path, output=tmp_path / "split")
    same_as(wrapper, tmp_path / "split")


def test_a_bf16_model_stays_one(tmp_path: Path) -> None:
    wrapper = actor_critic.build(dtype=torch.bfloat16)
    split_actor_critic(actor_critic.aliased(wrapper, tmp_path / "ppo"), output=tmp_path / "split")
    same_as(wrapper, tmp_path / "split")


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    path = actor_critic.aliased(actor_critic.build(), tmp_path / "ppo")
    (path / "optimizer.pt").write_bytes(b"state")
    split_actor_critic(path, output=tmp_path / "split")
    beside = {"config.json", "generation_config.json", "tokenizer_config.json", "notes.txt"}
    assert contents(tmp_path / "split/policy").keys() == beside | {"model.safetensors"}
    assert contents(tmp_path / "split/critic").keys() == {"config.json", "tokenizer_config.json", "model.safetensors"}
    assert all(contents(tmp_path / "split/policy")[name] == contents(path)[name] for name in beside)
    for part in ("policy", "critic"):  # the note of dropped names is not true of either
        assert read_header(tmp_path / "split" / part / "model.safetensors").metadata == {"format": "pt"}


def test_the_critic_is_described_as_a_classifier_with_one_label(tmp_path: Path) -> None:
    path = actor_critic.accelerated(actor_critic.build(tie_word_embeddings=True, pad_token_id=None), tmp_path / "ppo")
    split_actor_critic(path, output=tmp_path / "split")
    before, after = (json.loads((f / "config.json").read_text()) for f in (path, tmp_path / "split/critic"))
    assert after == before | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": "regression",
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def test_shards_are_named_and_counted_for_each_model(tmp_path: Path) -> None:
    wrapper = actor_critic.build()
    split_actor_critic(actor_critic.sharded(wrapper, tmp_path / "ppo"), output=tmp_path / "split")
    for part, model in (("policy", wrapper.policy), ("critic", wrapper.value_model)):
        folder = tmp_path / "split" / part
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        assert len(shards) > 1
        assert {n: f for f in shards for n in load_file(folder / f)} == index["weight_map"]
        assert index["metadata"] == {
            "total_size": sum(t.nbytes for t in model.state_dict().values()),
            "total_parameters": sum(t.numel() for t in model.state_dict().values()),
        }


def test_one_shard_alone_is_model_safetensors(tmp_path: Path) -> None:
    wrapper = actor_critic.build()
    tensors = actor_critic.without_backbone(wrapper)
    path = actor_critic.accelerated(wrapper, tmp_path / "ppo")
    (path / "model.safetensors").unlink()
    files = {"policy": "model-00001-of-00002.safetensors", "value_model": "model-00002-of-00002.safetensors"}
    for part, file in files.items():
        save_file({n: t for n, t in tensors.items() if n.startswith(f"{part}.")}, path / file)
    weight_map = {n: files[n.partition(".")[0]] for n in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    split_actor_critic(path, output=tmp_path / "split")
    for part in ("policy", "critic"):
        assert [p.name for p in (tmp_path / "split" / part).glob("model*")] == ["model.safetensors"]
    same_as(wrapper, tmp_path / "split")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_vh_10_policy_and_critic_in_one_file(tied: bool, tiny: Path, tmp_path: Path) -> None:
    decoder = load_file(tiny / "model.safetensors")
    if tied:
        decoder["lm_head.weight"] = decoder["model.embed_tokens.weight"].clone()
    critic = {name: tensor + 1 for name, tensor in decoder.items() if name != "lm_head.weight"}
    critic["score.weight"] = torch.linspace(-1, 1, 32).reshape(1, 32)
    path = tmp_path / "ppo"
    path.mkdir()
    config = json.loads((tiny / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))
    whole = {f"policy.{n}": t for n, t in decoder.items()} | {f"value_model.{n}": t for n, t in critic.items()}
    save_file(whole, path / "model.safetensors")
    split_actor_critic(path, output=tmp_path / "split")
    policy = loaded(AutoModelForCausalLM, tmp_path / "split/policy")
    assert policy.config.tie_word_embeddings is tied
    loaded(AutoModelForSequenceClassification, tmp_path / "split/critic")
    ours, theirs = (load_file(tmp_path / "split" / p / "model.safetensors") for p in ("policy", "critic"))
    assert ("lm_head.weight" in ours) is not tied
    for found, expected in ((ours, decoder), (theirs, critic)):
        assert expected.keys() - found.keys() <= {"lm_head.weight"}
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_value_model_with_a_bias_is_a_token_classifier(tmp_path: Path) -> None:
    wrapper = actor_critic.build()
    config = wrapper.value_model.config
    wrapper.value_model = AutoModelForTokenClassification.from_config(config).eval()
    wrapper.critic_backbone = wrapper.value_model.model
    torch.nn.init.ones_(wrapper.value_model.score.bias)
    split_actor_critic(actor_critic.aliased(wrapper, tmp_path / "ppo"), output=tmp_path / "split")
    critic = loaded(AutoModelForTokenClassification, tmp_path / "split/critic")
    with torch.no_grad():
        torch.testing.assert_close(critic(IDS).logits, wrapper.value_model(IDS).logits, rtol=0, atol=1e-6)
    assert critic.config.architectures == ["LlamaForTokenClassification"]


@pytest.mark.parametrize(("kept", "other"), [("policy", "value model"), ("critic", "policy")])
def test_one_half_alone_is_written_and_the_other_missed(kept: str, other: str, tmp_path: Path) -> None:
    wrapper = actor_critic.build()
    path = actor_critic.accelerated(wrapper, tmp_path / "ppo")
    prefix = "policy." if kept == "policy" else "value_model."
    tensors = {n: t for n, t in load_file(path / "model.safetensors").items() if n.startswith(prefix)}
    save_file(tensors, path / "model.safetensors")
    report = split_actor_critic(path, output=tmp_path / "split")
    assert f"no {other} was saved here" in report.summary
    assert [folder.name for folder in (tmp_path / "split").iterdir()] == [kept]
    auto = AutoModelForCausalLM if kept == "policy" else AutoModelForSequenceClassification
    loaded(auto, tmp_path / "split" / kept)


def test_a_critic_of_another_size_needs_its_own_configuration(tmp_path: Path) -> None:
    wrapper = actor_critic.build()
    small = actor_critic.build("qwen2", num_hidden_layers=1)
    wrapper.value_model, wrapper.critic_backbone = small.value_model, small.critic_backbone
    path = actor_critic.aliased(wrapper, tmp_path / "ppo")
    with pytest.raises(CheckpointError, match=r"config.json does not describe the critic; .* with --critic-config"):
        split_actor_critic(path, output=tmp_path / "split")
    small.value_model.save_pretrained(tmp_path / "reward")
    split_actor_critic(path, output=tmp_path / "split", critic_config=tmp_path / "reward")
    same_as(wrapper, tmp_path / "split")


def _with(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


REFUSED = {
    "value_model.model.norm.weight and critic_backbone.norm.weight differ": {
        "critic_backbone.norm.weight": torch.zeros(32)
    },
    "reference.model.norm.weight is neither of the policy nor of the value model": {
        "reference.model.norm.weight": torch.zeros(32)
    },
    r"value_model.score.weight \[2, 32\]; a critic has one output": {"value_model.score.weight": torch.zeros(2, 32)},
    r"value_model.score.weight \[1\]; a critic has one output": {"value_model.score.weight": torch.zeros(1)},
    r"value_model.score.weight \[\]; a critic has one output": {"value_model.score.weight": torch.tensor(1.0)},
    r"value_model.score.weight \[1, 7\]; .* as wide as its decoder": {"value_model.score.weight": torch.zeros(1, 7)},
    r"the value model has value_model.v_head.summary.weight \[1, 32\], which is not the head of": {
        "value_model.score.weight": None,
        "value_model.v_head.summary.weight": torch.zeros(1, 32),
    },
    "policy.model.layers.0.self_attn.q_proj.lora_A.default.weight belongs to an adapter": {
        "policy.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(4, 32)
    },
    "module.policy.model.norm.weight and policy.model.norm.weight are the same parameter": {
        "module.policy.model.norm.weight": torch.zeros(32)
    },
    "value_model.score.weight has 0 elements: looks like an un-gathered ZeRO-3 parameter": {
        "value_model.score.weight": torch.zeros(0)
    },
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_not_understood_is_refused_by_name(problem: str, tmp_path: Path) -> None:
    path = actor_critic.gathered(actor_critic.build(), tmp_path / "ppo")
    _with(path, REFUSED[problem])
    with pytest.raises(CheckpointError, match=problem):
        split_actor_critic(path, output=tmp_path / "split")
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize("name", ["value_head.safetensors", "adapter_model.safetensors"])
def test_other_weights_beside_them_are_refused(name: str, tmp_path: Path) -> None:
    path = actor_critic.accelerated(actor_critic.build(), tmp_path / "ppo")
    save_file({"v_head.summary.weight": torch.zeros(1, 32)}, path / name)
    with pytest.raises(CheckpointError, match=f"{name} beside the weights of policy and value model; move it away"):
        split_actor_critic(path, output=tmp_path / "split")


def test_a_tied_policy_whose_lm_head_differs_is_refused(tmp_path: Path) -> None:
    path = actor_critic.gathered(actor_critic.build(tie_word_embeddings=True), tmp_path / "ppo")
    _with(path, {"policy.lm_head.weight": torch.zeros(64, 32)})
    with pytest.raises(CheckpointError, match=r"differs from policy.model.embed_tokens.weight, and config.json ties"):
        split_actor_critic(path, output=tmp_path / "split")


def test_an_alias_of_nothing_is_refused(tmp_path: Path) -> None:
    path = actor_critic.accelerated(actor_critic.build(), tmp_path / "ppo")
    tensors = load_file(path / "model.safetensors")
    metadata = {"value_model.model.extra": "critic_backbone.extra"}
    save_file(tensors, path / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"value_model.model.extra is critic_backbone.extra, which is not there"):
        split_actor_critic(path, output=tmp_path / "split")


def test_a_plain_model_is_no_actor_critic_checkpoint(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither of the policy nor of the value model"):
        split_actor_critic(tiny, output=tmp_path / "split")


def test_a_family_without_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    path = actor_critic.accelerated(actor_critic.build(), tmp_path / "ppo")
    config = json.loads((path / "config.json").read_text())
    for kind, problem in (
        ("cohere", "no classifier for cohere"),
        ("xyz", "model_type 'xyz' is not known"),
        ([], "model_type .. is not known"),
    ):
        (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        with pytest.raises(CheckpointError, match=problem):
            split_actor_critic(path, output=tmp_path / "split")
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json; copy that of the policy into it"):
        split_actor_critic(path, output=tmp_path / "split")


_MEASURED = """
import sys
from pathlib import Path
from tools.postprocess.split_actor_critic import split_actor_critic

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10

before = peak()
split_actor_critic(Path(sys.argv[1]), output=Path(sys.argv[2]))
print(peak() - before, "torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to measure memory")
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "ppo"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "pad_token_id": 0}')
    shape = (1 << 14, 1 << 12)
    large = [f"{part}.embed_tokens.weight" for part in ("critic_backbone", "policy.model", "value_model.model")]
    rows = [*((name, "BF16", shape, 2 << 26) for name in large), ("value_model.score.weight", "BF16", (1, 4096), 8192)]
    with (path / "model.safetensors").open("wb") as file:
        file.write(build_header(rows, {}))
        file.truncate(file.tell() + sum(nbytes for *_, nbytes in rows))
    command = [sys.executable, "-c", _MEASURED, path, tmp_path / "split"]
    grown, has_torch = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(grown) < 32 << 20
    assert has_torch == "False"
