"""The demo's training as a bare TRL script, up to its first step: MODEL OUTPUT_DIR."""

import sys

from datasets import load_dataset
from leave import LeaveAtFirstStep
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, output_dir = sys.argv[1:]
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    args=SFTConfig(
        output_dir=output_dir,
        max_steps=20,
        max_length=256,
        per_device_train_batch_size=2,
        learning_rate=2e-4,
        logging_steps=1,
        save_steps=10,
        seed=42,
        bf16=False,
        use_cpu=True,
        report_to="none",
    ),
    train_dataset=load_dataset("json", data_files="examples/data/instructions.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained(model),
    peft_config=LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights="pissa_niter_4"
    ),
    callbacks=[LeaveAtFirstStep()],
)
trainer.train()
