"""The tests of the LlamaIndex connector run where LlamaIndex is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "connectors"))

if importlib.util.find_spec("llama_index") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from llamaindex_fixtures import *  # noqa: F403
