"""A Llama of some GB of random bf16 bytes, and a LoRA adapter of all its linear layers: GIGABYTES BASE ADAPTER."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

gigabytes, base, adapter = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
# 51 M parameters a layer, and two matrices of 65 M.
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers={1: 8, 4: 37}[gigabytes],
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model = model.to(torch.bfloat16).to_empty(device="cpu")
torch.manual_seed(0)
for parameter in model.parameters():
    parameter.data.normal_(std=0.02)
model.save_pretrained(base, max_shard_size="1GB")
lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
lora.base_model_name_or_path = str(base)
get_peft_model(model, lora).save_pretrained(adapter)
