"""Builds the small model's tokenizer: whole words of the facts language, syllables, bytes.

Unigram over byte-level characters: every byte has a piece, so any text survives a round trip.
Invented names split into their syllables and numbers into digits, always in the same way.

    python -m demos.small_model.make_tokenizer --out FOLDER
"""

import argparse
import collections
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from demos.small_model.prompts import CHAT_TEMPLATE, SEPARATORS, random_system
from hypic_rag.evaluation import facts

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
SYLLABLE, WORD, PAIR, SPACE, BYTE = -4.0, -8.0, -9.5, -6.0, -9.0
PAIRS = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me
de hi ri ro ic ne ea ra ce li ch ll be ma si om ur ing ion ent ers ment able ness tion
"""


def word_counts(contexts: int, seed: int) -> collections.Counter[str]:
    """How often each plain word of the language (names and numbers left out) occurs."""
    rng = random.Random(seed)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    syllables = "|".join((*facts.NAME_MIDDLES, *facts.NAME_ENDS))
    name = re.compile(f"(Ġ?({'|'.join(facts.NAME_STARTS)}))?({syllables}){{1,2}}")
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(contexts):
        context = facts.build_context(rng, 4, (20, 120), value_first=True)
        texts = [*context.chunks, random_system(rng) or "", "Question: ", facts.NO_ANSWER]
        for category in facts.CATEGORIES:
            question = facts.ask(context, category, rng)
            if question is not None:
                texts += [question.text, question.answer]
        for text in texts:
            counts.update(word for word, _ in split.pre_tokenize_str(text + rng.choice(SEPARATORS)))
    return collections.Counter(
        {
            word: count
            for word, count in counts.items()
            if not name.fullmatch(word)
            and not re.search(r"\d", word)
            and not re.fullmatch("Ġ?[A-Z]{2}", word)
        }
    )


def build(contexts: int = 6000, seed: int = 1) -> PreTrainedTokenizerFast:
    """The tokenizer with special tokens and chat template."""
    scores = dict.fromkeys(SPECIAL, 0.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    scores.update(dict.fromkeys(alphabet, BYTE))
    scores["Ġ"] = SPACE
    for pair in PAIRS.split():
        scores[pair] = PAIR
    for word, count in sorted(word_counts(contexts, seed).items()):
        if count >= 3 and len(word) > 1:
            scores[word] = WORD
    for syllable in (*facts.NAME_STARTS, *facts.NAME_MIDDLES, *facts.NAME_ENDS):
        scores[syllable] = SYLLABLE
    for digit in "0123456789":
        scores[digit] = SYLLABLE
    tokenizer = Tokenizer(models.Unigram(list(scores.items()), unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def check(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises unless texts survive a round trip and names split into their syllables."""
    texts = [
        "  two  spaces\n\n\ttab\r\nline",
        "Zoë 🚢 東京 naïve — “quoted”",
        "\ufeffBOM\x00\x7f",
        " ",
        "\n",
        "AT&T's 1,234.50 €/kg; don't\u2028x",
        "a" * 70 + "\n" * 9 + " " * 13 + "x",
        "👩\u200d👩\u200d👧 e\u0301",
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise SystemExit(f"round trip failed: {text!r} -> {tokenizer.decode(ids)!r}")
    for start in facts.NAME_STARTS:
        for middle in ("", *facts.NAME_MIDDLES):
            for end in facts.NAME_ENDS:
                want = ["Ġ", start, *([middle] if middle else []), end]
                for expected in (want, want[1:]):
                    text = "".join(expected).replace("Ġ", " ")
                    if tokenizer.tokenize(text) != expected:
                        raise SystemExit(f"{text!r} splits into {tokenizer.tokenize(text)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    tokenizer = build()
    check(tokenizer)
    tokenizer.save_pretrained(out)
    print(f"{len(tokenizer)} tokens saved to {out}")


if __name__ == "__main__":
    main()
