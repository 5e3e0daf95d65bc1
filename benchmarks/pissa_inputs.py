"""Random bf16 Llama of 1.1 billion parameters, and a PiSSA adapter before and after training: BASE INIT ADAPTER."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

base, init, adapter = sys.argv[1:]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(base)
lora = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear", init_lora_weights="pissa_niter_4")
wrapped = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
# PEFT subtracts again on loading unless the initial adapter says that its values are its own.
lora.init_lora_weights = True
wrapped.save_pretrained(init)
lora.init_lora_weights = "pissa_niter_4"
with torch.no_grad():
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.add_(0.01 * torch.randn_like(parameter))
wrapped.save_pretrained(adapter)
