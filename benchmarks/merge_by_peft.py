"""PEFT's own merge, as its documentation has it: BASE ADAPTER OUTPUT."""

import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, output = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
model.merge_and_unload().save_pretrained(output, max_shard_size="1GB")
