"""The value head split as trainers do it: load every tensor, remove the file, save the decoder, save the head."""

import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

folder = Path(sys.argv[1])
tensors = load_file(folder / "model.safetensors")
(folder / "model.safetensors").unlink()
head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("v_head.")}
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
save_file(head, folder / "value_head.safetensors", metadata={"format": "pt"})
