"""A loaded model: the library's modules, the family that knows them, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypic_rag.errors import ConfigError, ModelLoadError, UnsupportedModelError
from hypic_rag.families import FAMILIES, Family, family_for
from hypic_rag.families.base import LayerSpec, LinearSpec
from hypic_rag.ops.linear import apply_linear

__all__ = ["HybridModel", "describe", "load_pretrained", "wrap"]


@dataclass(frozen=True, eq=False)
class HybridModel:
    """An unmodified model of the library and what this package knows of it.

    Attributes:
        name: what it was loaded by.
        module: the library's causal language model.
        tokenizer: the library's tokenizer, or None.
        family: how its layers map onto the engine.
        config: its text configuration.
        layers: one specification per layer.
    """

    name: str
    module: Any
    tokenizer: Any
    family: Family
    config: Any
    layers: tuple[LayerSpec, ...]

    @property
    def decoder(self) -> nn.Module:
        """The stack of layers without the output head."""
        decoder: nn.Module = self.module.model
        return decoder

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The layers in order."""
        layers: nn.ModuleList = self.module.model.layers
        return list(layers)

    @cached_property
    def device(self) -> torch.device:
        """Where the embedding lives, and with it everything the engine makes."""
        device: torch.device = self.module.get_input_embeddings().weight.device
        return device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        dtype: torch.dtype = self.module.get_input_embeddings().weight.dtype
        return dtype

    @property
    def kernel(self) -> int:
        """Tokens that the short convolutions look at."""
        return max(spec.kernel for spec in self.layers if isinstance(spec, LinearSpec))

    @property
    def context_length(self) -> int:
        """Tokens that the model was made for."""
        return int(self.config.max_position_embeddings)

    def embedding_like(self) -> Tensor:
        """An empty tensor with the dtype and device of the hidden states."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and output head on ``x [n, hidden]``: ``[n, vocab]``."""
        return apply_linear(self.module.lm_head, self.module.model.norm(x))

    def segment_bytes(self, tokens: int) -> int:
        """Bytes of the state of a segment with ``tokens`` interior tokens."""
        size = self.dtype.itemsize
        return sum(spec.state_bytes(tokens, size) for spec in self.layers)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the configuration and every parameter and buffer, with dtypes.

        It's the content that counts: adapters, merged or attached, quantisation and another
        revision under the same name all change it.
        """
        sha = hashlib.sha256(b"hypic-model")
        sha.update(self._describe_config().encode("utf-8"))
        entries = sorted(self.module.state_dict(keep_vars=False).items())
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda entry: _tensor_digest(*entry), entries)
            for digest in digests:
                sha.update(digest)
        return sha.hexdigest()

    def _describe_config(self) -> str:
        config = self.config.to_dict()
        # Where a checkpoint lies, and which release saved it, changes no result.
        for name in ("_name_or_path", "transformers_version", "use_cache"):
            config.pop(name, None)
        return json.dumps(config, sort_keys=True, default=str)

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 (hex) of the tokenizer's whole definition."""
        tokenizer = self.require_tokenizer()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            definition = backend.to_str()
        else:
            definition = json.dumps(sorted(tokenizer.get_vocab().items()))
        return hashlib.sha256(definition.encode("utf-8")).hexdigest()

    def require_tokenizer(self) -> Any:
        """The tokenizer; raises :class:`ModelLoadError` if the checkpoint has none."""
        if self.tokenizer is None:
            raise ModelLoadError(
                f"{self.name!r} has no tokenizer, but text has to be tokenised: add the "
                "tokenizer's files to the checkpoint."
            )
        return self.tokenizer


def wrap(module: Any, tokenizer: Any = None, name: str = "") -> HybridModel:
    """Wrap a model that the library has loaded; it's used as it is and never changed.

    Raises:
        UnsupportedModelError: no family here serves it.
    """
    config = module.config.get_text_config(decoder=True)
    family = _require_family(config, name or type(module).__name__)
    module.eval()
    return HybridModel(name, module, tokenizer, family, config, family.layers(config))


def describe(name_or_path: str | Path) -> tuple[Any, Family]:
    """Text configuration and family of a checkpoint, without its weights.

    Raises:
        ModelLoadError, UnsupportedModelError: as :func:`load_pretrained`.
    """
    from transformers import AutoConfig

    name = str(name_or_path)
    _check_local(name)
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(name, error) from error
    return config, _require_family(config, name)


def load_pretrained(
    name_or_path: str | Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype | str,
    name: str | None = None,
) -> HybridModel:
    """Load an unmodified checkpoint by hub name or local path; ``name`` is what it's called.

    Raises:
        ModelLoadError: it can't be found or read.
        UnsupportedModelError: no family here serves it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(name_or_path)
    describe(path)
    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        module = module.to(device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _load_error(path, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    return wrap(module, tokenizer, name or path)


def _check_local(name: str) -> None:
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"The folder {name!r} holds no config.json: expected a transformers checkpoint."
        )
    if looks_local and not path.exists():
        raise ModelLoadError(f"There's no model at {name!r}: check the path.")


def _load_error(name: str, error: Exception) -> ModelLoadError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelLoadError(
        f"The model {name!r} can't be loaded ({reason}): check the name, or download it first "
        "and give its folder."
    )


def _require_family(config: Any, name: str) -> Family:
    family = family_for(config.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"{name!r} is of the type {config.model_type!r}, which isn't supported: "
            f"expected one of {known}."
        )
    reason = family.unsupported(config)
    if reason:
        raise UnsupportedModelError(f"{name!r} ({config.model_type}) isn't supported: {reason}.")
    return family


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"Expected a tensor for {name!r}, got {type(tensor).__name__}.")
    data = tensor.detach().to("cpu").contiguous()
    sha = hashlib.sha256(f"{name}:{data.dtype}:{tuple(data.shape)}".encode())
    sha.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return sha.digest()
