"""PEFT's own conversion of a PiSSA adapter, as its documentation has it: BASE ADAPTER INIT OUTPUT."""

import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, init, output = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
model.save_pretrained(output, path_initial_model_for_weight_conversion=init)
