"""The algebra of LoRA adapters: stacking two, finding or recovering the initial one, less rank, what servers take."""
