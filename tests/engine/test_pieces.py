from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from models import VOCAB, live_heads, tiny_model

from hypic_rag.config import Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import recompute
from hypic_rag.engine.pieces import encode_pieces, join_pieces, seam_cuts, state_from_pieces
from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment

SEAMS = (Seam(0, 0), Seam(4, 0), Seam(8, 8), Seam(1, 4))


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid_rope"])
@pytest.mark.parametrize("conditioned", [True, False])
def test_pieces_join_to_every_seam(family: str, conditioned: bool) -> None:
    model = tiny_model(family)
    base = recompute(model, tokens(21, 1))[0] if conditioned else None
    segments = [Segment(tokens(length, length)) for length in (3, 20, 133)]
    cuts = [seam_cuts(len(segment), SEAMS) for segment in segments]
    pieces = encode_pieces(model, segments, cuts, [base] * 3)
    for seam in SEAMS:
        whole = encode_segments(model, segments, seam, base)
        for index, segment in enumerate(segments):
            mine = state_from_pieces(pieces[index], cuts[index], len(segment), seam, model.kernel)
            yours = whole[index]
            if mine is None or yours is None:
                assert mine is yours
                continue
            assert mine.metadata() == yours.metadata()
            mine_tensors, your_tensors = mine.to_tensors(), yours.to_tensors()
            for name, tensor in your_tensors.items():
                torch.testing.assert_close(mine_tensors[name], tensor, rtol=1e-3, atol=2e-4)
    assert live_heads([pieces[2][0]]) >= 0.25


def test_any_inner_run_can_be_recomputed() -> None:
    """Pieces in true context stay exact whichever of them are computed."""
    model = tiny_model("qwen3_5")
    base = recompute(model, tokens(21, 1))[0]
    segment = Segment(tokens(133, 4))
    cuts = (5, 40, 90)
    states = encode_pieces(model, [segment], [cuts], [base])[0]
    edges = (0, *cuts, 133)
    parts = tuple(Segment(segment.token_ids[start:end]) for start, end in pairwise(edges))
    for computed in ((), (1,), (0, 2), (0, 1, 2, 3)):
        chosen = tuple(None if i in computed else state for i, state in enumerate(states))
        assembly = assemble(model, [Request(parts, chosen, tokens(7, 9), base)])[0]
        whole = recompute(model, assembly.context.token_ids)[1][-1]
        torch.testing.assert_close(assembly.context.logits, whole, rtol=0, atol=2e-4)


def test_wrong_cuts_and_joins_are_refused() -> None:
    model = tiny_model("qwen3_5")
    segment = Segment(tokens(20, 1))
    for cuts in ((5, 5), (0,), (20,), (9, 4)):
        with pytest.raises(ConfigError, match="increasing places"):
            encode_pieces(model, [segment], [cuts], [None])
    pieces = encode_pieces(model, [segment], [(5, 9)], [None])[0]
    with pytest.raises(ConfigError, match="follow one another"):
        join_pieces([pieces[0], pieces[2]], model.kernel)
    with pytest.raises(ConfigError, match="needs cuts at 4"):
        state_from_pieces(pieces, (5, 9), 20, Seam(4, 0), model.kernel)
