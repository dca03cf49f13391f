from __future__ import annotations

import pytest
import torch
from models import BUILDERS, slow_decay

from hypic_rag.engine.self_test import self_test
from hypic_rag.errors import SelfTestError
from hypic_rag.families.model import wrap


@pytest.mark.parametrize("family", sorted(BUILDERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_model_passes(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = BUILDERS[family]()
    slow_decay(module)
    assert self_test(wrap(module.to(dtype), name=family)) > 0


@pytest.mark.parametrize(("layer", "mixer"), [(1, "linear_attn"), (2, "self_attn")])
def test_a_deviating_layer_is_named(layer: int, mixer: str) -> None:
    torch.manual_seed(0)
    module = BUILDERS["qwen3_5"]()
    slow_decay(module)

    def tamper(_module: object, _inputs: object, output: object) -> object:
        return (output[0] * 1.05, *output[1:]) if isinstance(output, tuple) else output * 1.05

    getattr(module.model.layers[layer], mixer).register_forward_hook(tamper)
    with pytest.raises(SelfTestError, match=f"layer {layer} "):
        self_test(wrap(module.float(), name="tampered"))
