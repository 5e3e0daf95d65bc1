"""The real transformers and PEFT, loading what a killed step left, before anything repairs it."""

from pathlib import Path
from typing import Any

from torture.image import Image, write_image
from torture.laws import Lost, Subject

# What was loaded: names that were missing or not expected, and every tensor by name.
Outcome = tuple[list[str], list[str], dict[str, bytes]]


def load_at_every_stop(subject: Subject) -> tuple[int, int, list[str]]:
    """The number of different stops, how many of them load, and what each broken law says."""
    known = [_loaded(subject, tree) for tree in (subject.case.before, subject.after)]
    broken, loads = [], 0
    for image in subject.stops.values():
        found = _loaded(subject, image)
        loads += found is not None
        if found is not None and found not in known:
            broken.append(f"{subject.case.name}: a loader loads a mixture of old and new")
    if known[1] is None:
        raise Lost(f"{subject.case.name}: the new model does not load")
    return len(subject.stops), loads, broken


def _loaded(subject: Subject, image: Image) -> Outcome | None:
    write_image(image, subject.root)
    checkpoint = subject.root / "checkpoint"
    try:
        return _adapter(checkpoint) if subject.case.arguments[0] == "convert-pissa" else _model(checkpoint)
    except Exception:  # every way in which a loader may fail is right
        return None


def _model(checkpoint: Path) -> Outcome:
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    missing, unexpected = sorted(told["missing_keys"]), sorted(told["unexpected_keys"])
    return missing, unexpected, {n: t for n, t in _bytes(model.state_dict()).items() if n not in missing}


def _adapter(checkpoint: Path) -> Outcome:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    config = PeftConfig.from_pretrained(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    return [], [str(config.r)], _bytes(get_peft_model_state_dict(PeftModel.from_pretrained(base, checkpoint)))


def _bytes(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in state.items()}
