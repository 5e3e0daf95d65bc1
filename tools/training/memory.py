"""How much memory a training takes, estimated from shapes: right within tens of percent, not to the byte."""

from typing import Any

STATES = {"adafactor": 0, "sgd": 0, "adamw_8bit": 2, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2}  # bytes a parameter
MOMENTS = 2  # of Adam, each of the dtype of its parameter
BITS = {"4bit": 4.5, "8bit": 8.5}  # with the scales
# Tensors of [batch, length, hidden] that a decoder layer keeps for the backward pass: inputs of four norms and matrix
# products, q, k, v and what attention gives, and, each some 2.7 times as wide, three of the feed-forward part.
KEPT = 16
LOGITS = 3  # logits, their softmax and its gradient, in float32


def estimate(model: Any, args: Any, longest: int, quantization: str | None) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer states and activations, the last for a batch of the longest row."""
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    frozen = [each for each in parameters if not each.requires_grad]
    bits = BITS.get(quantization or "")
    weights = sum(
        each.numel() * (bits / 8 if bits and each.dim() > 1 else each.element_size()) for each in frozen
    ) + sum(each.numel() * each.element_size() for each in trained)
    gradients = sum(each.numel() * each.element_size() for each in trained)
    states = STATES.get(str(getattr(args.optim, "value", args.optim)))
    return {
        "weights": int(weights),
        "gradients": gradients,
        "optimizer": MOMENTS * gradients if states is None else states * sum(each.numel() for each in trained),
        "activations": _activations(model, args, longest),
    }


def _activations(model: Any, args: Any, longest: int) -> int:
    """Per layer what the backward pass needs, or with gradient checkpointing the input of each and one whole layer."""
    config = model.config.get_text_config()
    tokens = args.train_batch_size * longest
    element = 2 if args.bf16 or args.fp16 else 4
    layer_input = tokens * config.hidden_size * element
    layers = config.num_hidden_layers
    kept = layers + KEPT if args.gradient_checkpointing else layers * KEPT
    return int(layer_input * kept + tokens * config.vocab_size * 4 * LOGITS)
