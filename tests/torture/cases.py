"""The cases: a step, the layout it works on, and whether it works in place, copies, or makes an output."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torture.image import Image, read_image

Build = Callable[[Path], object]
FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class Case:
    """One step on one tree. `arguments` are those of the `tools` command, with `{}` for the folder of the tree.

    `target` is the directory of the tree that changes, `before` the whole tree, `torch` whether the step imports torch,
    `undoes` whether it takes a step back: then a second run is refused, and nothing is kept; `no_links` whether it runs
    on a file system without hard links.
    """

    name: str
    before: Image
    arguments: tuple[str, ...]
    target: str = "checkpoint"
    torch: bool = False
    undoes: bool = False
    no_links: bool = False

    @property
    def is_output(self) -> bool:
        return self.target != "checkpoint"

    def command(self, root: Path) -> list[str]:
        """The arguments for the tree at `root`."""
        return [argument.replace("{}", str(root)) for argument in self.arguments]


def tiny_llama(path: Path) -> Path:
    """A random Llama of two layers, saved by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2)).save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)  # for users who may not write
    return path


def sharded_prefixed(tiny: Path, path: Path) -> Path:
    """Several shards, each of which changes: as a sharded ZeRO-3 save of TRL's wrapper."""
    import heads
    from safetensors.torch import load_file, save_file

    heads.sharded(tiny, path)
    for shard in path.glob("model-*.safetensors"):
        named = {
            f"pretrained_model.{n}".replace("pretrained_model.v_head", "v_head"): t for n, t in load_file(shard).items()
        }
        save_file(named, shard, metadata={"format": "pt"})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name if name.startswith("v_head") else f"pretrained_model.{name}": shard
        for name, shard in index["weight_map"].items()
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _wrapped(name: str) -> str:
    return name if name.startswith("v_head") else f"pretrained_model.{name}"


def _layouts(tiny: Path) -> dict[str, Build]:
    import heads

    layouts: dict[str, Build] = {name: partial(build, tiny) for name, build in heads.LAYOUTS.items()}
    layouts["sharded_prefixed"] = partial(sharded_prefixed, tiny)
    layouts["lora_pickled"] = lambda path: shutil.copytree(FIXTURES / "trl-valuehead-lora", path)
    return layouts


def _tree(*builds: Build) -> Image:
    with tempfile.TemporaryDirectory() as folder:
        for build in builds:
            build(Path(folder) / "checkpoint")
        return read_image(Path(folder))


def _trained(tiny: Path) -> Build:
    """A PiSSA adapter with its initial one beside it."""

    def build(path: Path) -> None:
        import adapters

        run = adapters.train(tiny, path.parent)
        shutil.rmtree(run.residual)
        run.adapter.rename(path)

    return build


def all_cases(tiny: Path) -> dict[str, Callable[[], Case]]:
    """Every case by its name, each built when it is asked for, by the libraries that leave such checkpoints behind.

    `tiny` is the model they start from.
    """
    found: dict[str, Callable[[], Case]] = {}

    def add(name: str, builds: Sequence[Build], arguments: Sequence[str], target: str = "checkpoint") -> None:
        torch, undoes = "pickled" in name, name.startswith("undo")
        no_links = name.endswith("without hard links")
        found[name] = lambda: Case(name, _tree(*builds), tuple(arguments), target, torch, undoes, no_links)

    split, back = ("fix-valuehead", "{}/checkpoint"), ("undo", "{}/checkpoint")
    output, made = ("--output", "{}/new/output"), "new/output"
    layouts, trained = _layouts(tiny), _trained(tiny)
    for layout, build in layouts.items():
        add(f"fix-valuehead {layout}", [build], split)
        add(f"fix-valuehead {layout} --copy", [build], (*split, "--copy"))
        add(f"fix-valuehead {layout} --output", [build], (*split, *output), made)
        add(f"undo fix-valuehead {layout}", [build, _split], back)
    join = ("join-valuehead", "{}/checkpoint")
    for layout in ("flat", "sharded"):
        add(f"join-valuehead {layout}", [layouts[layout], _split, _forgotten], join)
    convert = ("convert-pissa", "{}/checkpoint", "--init", "{}/pissa_init", "--base", os.fspath(tiny))
    add("convert-pissa", [trained], convert)
    add("convert-pissa --output", [trained], (*convert, *output), made)
    add("undo convert-pissa", [trained, _convert], back)
    for name, builds, arguments in (
        ("convert-pissa", [trained], convert),
        ("fix-valuehead lora_pickled", [layouts["lora_pickled"]], split),
        ("fix-valuehead sharded --copy", [layouts["sharded"]], (*split, "--copy")),
        ("undo fix-valuehead sharded", [layouts["sharded"], _split], back),
        ("undo convert-pissa", [trained, _convert], back),
    ):
        add(f"{name}, without hard links", builds, arguments)
    flat, bundle = layouts["flat"], ("bundle-processor", "{}/checkpoint", "--from", "{}/model")
    add("bundle-processor", [flat, _with_model], bundle)
    add("bundle-processor --output", [flat, _with_model], (*bundle, *output), made)
    add("undo bundle-processor", [flat, _with_model, _bundle], back)
    add("fix-valuehead after bundle-processor", [flat, _with_model, _bundle], split)
    older = [layouts["at_start"], _made_of_it, flat]
    add("fix-valuehead flat --output --overwrite", older, (*split, "--output", "{}/output", "--overwrite"), "output")
    return found


def _split(path: Path) -> None:
    from tools.postprocess.fix_valuehead import fix_valuehead

    fix_valuehead(path)


def _forgotten(path: Path) -> None:
    """No step has been here."""
    shutil.rmtree(path / ".burnish")


def _convert(path: Path) -> None:
    from tools.postprocess.convert_pissa import convert_pissa

    convert_pissa(path, init=path.parent / "pissa_init")


def _made_of_it(path: Path) -> None:
    """An output of this checkpoint, which then goes."""
    from tools.postprocess.fix_valuehead import fix_valuehead

    fix_valuehead(path, output=path.parent / "output")
    shutil.rmtree(path)


def _with_model(path: Path) -> None:
    shutil.copytree(FIXTURES / "hf-reward-model", path.parent / "model")


def _bundle(path: Path) -> None:
    from tools.postprocess.bundle_processor import bundle_processor

    bundle_processor(path, source=path.parent / "model")
