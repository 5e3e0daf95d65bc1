"""A Python object by its dotted path, as a configuration names it."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError


def load_dotted(path: str, key: str) -> Any:
    """The object `package.module.Name`; modules in the current directory are found too, after all installed ones.

    Raises CheckpointError naming `key`, the place in the configuration, when there is no such module or name, and when
    the module cannot be imported.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise CheckpointError(key, f"{path!r} is no dotted path", "write package.module.Name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            problem = f"{module} needs {error.name}, which is not installed"
            raise CheckpointError(key, problem, f"install what has {error.name}") from error
        raise CheckpointError(key, f"there is no module {error.name}", "install it, or run where it lies") from None
    except Exception as error:  # whatever a module of theirs raises
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(key, f"{module} cannot be imported ({reason})", "mend it") from error
    try:
        return getattr(found, name)
    except AttributeError:
        raise CheckpointError(key, f"{found.__file__} has no {name}") from None
