"""Where this package's instrumentation events go."""

from __future__ import annotations

import llama_index.core.instrumentation as instrument

__all__ = ["dispatcher"]

dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]  # re-exported silently
