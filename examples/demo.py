"""The whole of Burnish on a real model: train, repair, package, prove; twice, for an adapter and for a reward model.

    python examples/demo.py [FOLDER]

FOLDER holds `model` (see get_model.py) and receives `runs`; by default it is .demo. What is there already is not done
again, so a second run is quick.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.report import Report

EXAMPLES = Path(os.path.relpath(Path(__file__).parent))

TRY = '''\
"""The two models of the demo, loaded as anybody would load them."""

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.training import value_head

model = AutoModelForCausalLM.from_pretrained("{model}")
model = PeftModel.from_pretrained(model, "{adapter}")
tokenizer = AutoTokenizer.from_pretrained("{adapter}")


def chat(*texts, **options):
    roles = ("user", "assistant")
    messages = [dict(role=role, content=text) for role, text in zip(roles, texts)]
    return tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **options)


question = "What does a safetensors file begin with?"
asked = chat(question, add_generation_prompt=True)
answer = model.generate(**asked, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)
print("answer:", tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))

reward = value_head.load("{reward}")
for text in ("With the length of its header.", "I do not want to talk about files."):
    print(f"score {{reward(**chat(question, text)).item():+.3f}}:", text)
'''


def main(folder: Path) -> None:
    """Run both flows and print what was made, where, how long each step took, and how to use it."""
    os.environ.setdefault("PREFECT_HOME", str(folder.resolve() / "prefect"))  # its database stays in the folder
    from flows.command import quiet
    from flows.post_train import post_train

    began = time.monotonic()
    say = Console(highlight=False, soft_wrap=True).print
    runs = {name: folder / "runs" / name for name in ("sft", "reward")}
    reports: dict[str, Sequence[Report]] = {}
    with quiet():
        for name, run in runs.items():
            overrides = (f"model.model_name_or_path={folder / 'model'}", f"training.output_dir={run}")
            say(f"\n[bold]python -m flows.post_train {EXAMPLES / name}.yaml {' '.join(overrides)}[/]")
            reports[name] = post_train(EXAMPLES / f"{name}.yaml", overrides)
    adapter, reward = (reports[name][-1].path for name in runs)
    script = folder / "try.py"
    script.write_text(TRY.format(model=folder / "model", adapter=adapter, reward=reward))
    Console().print(steps_table(reports), made_table(folder, runs, adapter, reward))
    say(f"\nHow to use them, in {script}:\n")
    say(script.read_text().partition('"""\n\n')[2], markup=False)
    say(f"[bold]{sys.executable} {script}[/] runs it. The demo took {time.monotonic() - began:.0f} s.")


def steps_table(reports: dict[str, Sequence[Report]]) -> Table:
    """What every step did, and in how many seconds."""
    table = Table("run", "step", "seconds", Column("what it did", overflow="fold"), title="Steps", title_justify="left")
    for name, done in reports.items():
        for report in done:
            table.add_row(name, report.step, f"{report.seconds:.1f}", report.summary)
    return table


def made_table(folder: Path, runs: dict[str, Path], adapter: str, reward: str) -> Table:
    """What lies where now."""
    table = Table("what", Column("where", overflow="fold"), title="Made", title_justify="left")
    table.add_row("the model, as downloaded", str(folder / "model"))
    table.add_row("PiSSA training: checkpoints, optimizer, log", str(runs["sft"]))
    table.add_row("its adapter as plain LoRA for the model above, with tokenizer", adapter)
    table.add_row("reward training: checkpoints with the head among the weights", str(runs["reward"]))
    table.add_row("its decoder, loadable as a causal LM, with value_head.safetensors beside it", reward)
    return table


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo"))
    except CheckpointError as error:
        sys.exit(f"error: {error}")
