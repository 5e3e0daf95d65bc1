"""A plain load by transformers, which must miss nothing and find nothing it does not know."""

from pathlib import Path
from typing import Any


def loaded(auto: Any, path: Path) -> Any:
    """The model that an Auto class makes of a directory, ready to be asked."""
    model, loading = auto.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    return model.eval()
