"""Writes a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer load.

python -m demos.small_model.export --checkpoint FILE --tokenizer FOLDER --out FOLDER
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig

from demos.small_model.train import make_config, make_model


def export(checkpoint: Path, tokenizer_folder: Path, out: Path) -> None:
    """Saves model, tokenizer and generation settings; files are replaced one by one."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = make_model(make_config(tokenizer), seed=0)
    model.load_state_dict(torch.load(checkpoint)["model"])
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=48,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in sorted(temporary.iterdir()):
            file.chmod(0o644)
            os.replace(file, out / file.name)
    finally:
        shutil.rmtree(temporary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.checkpoint, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
