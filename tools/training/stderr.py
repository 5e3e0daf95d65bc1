"""What training says on its way, on stderr: of the first process everything, of another what went wrong."""

import logging
import warnings

from tools.training.ranks import rank


def log_to_stderr(level: int = logging.INFO) -> None:
    """Let the loggers of `tools` write lines; stdout is for the report. Other ranks begin theirs with their number."""
    number = rank()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"rank {number}: %(message)s" if number else "%(message)s"))
    logger = logging.getLogger("tools")
    logger.setLevel(max(level, logging.WARNING) if number else level)
    logger.handlers = [handler]
    logger.propagate = False
    if number:  # what libraries warn of, the first process says as well
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        warnings.simplefilter("ignore")
