from __future__ import annotations

import pytest
import torch
from models import VOCAB, tiny_model

from hypic_rag.engine.context import Context, forward, forward_rows, new_cache
from hypic_rag.errors import ConfigError


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_continuations_side_by_side_are_continuations_one_by_one(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(37, 1)
    cache = new_cache(model.config)
    context = Context(ids, cache, forward(model.module, ids, 0, cache)[-1])
    rows = [tokens(length, length) for length in (1, 9, 4, 9)]
    found = forward_rows(model.module, rows, context)
    assert [logits.shape for logits in found] == [(len(row), VOCAB) for row in rows]
    for row, logits in zip(rows, found, strict=True):
        behind = context.clone()
        alone = forward(model.module, row, len(ids), behind.cache, all_logits=True)
        torch.testing.assert_close(logits, alone, rtol=0, atol=2e-4)
    # The context is left as it was.
    again = forward_rows(model.module, rows, context)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    for broken in ([], [(1, 2), ()]):
        with pytest.raises(ConfigError, match="at least one token"):
            forward_rows(model.module, broken, context)
