"""For programs that talk to people: no chatter of the libraries below."""

from __future__ import annotations

import logging

__all__ = ["quiet_library"]


def quiet_library() -> None:
    """Keep transformers' hints and progress bars, and the hub's retries, off the terminal.

    The hints name packages for GPUs that would speed up the library's own forward; what this
    package runs doesn't need them.
    """
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
