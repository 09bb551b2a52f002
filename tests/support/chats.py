"""Tokenizers with chat templates in published styles, and conversations for them."""

import json
import tomllib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_FILE = tomllib.loads(Path(__file__).with_name("chat_templates.toml").read_text(encoding="utf-8"))
STYLES: dict[str, dict[str, Any]] = _FILE["styles"]
CHATML: str = _FILE["chatml_unmarked"]
TEMPLATES: dict[str, str] = {name: style["template"] for name, style in STYLES.items()}
TURN_END: dict[str, str] = {name: style["turn_end"] for name, style in STYLES.items()}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "user", "content": "Name the colours of the rainbow."},
        {"role": "assistant", "content": "Red, orange, yellow, green, blue, indigo, violet."},
        {"role": "user", "content": "And in French? é ü 日本"},
        {"role": "assistant", "content": "Rouge, orange, jaune, vert, bleu, indigo, violet.\nVoilà 🌈!"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome"},
    ],
    [{"role": "user", "content": "if x:\n    return"}, {"role": "assistant", "content": "else:\n    pass\n"}],
    [{"role": "user", "content": "Hello there, how are you?"}, {"role": "assistant", "content": "Fine."}],
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *CONVERSATIONS[0]]


def conversations(style: str) -> list[list[dict[str, Any]]]:
    return CONVERSATIONS if style == "gemma" else [*CONVERSATIONS, WITH_SYSTEM]


def make_tokenizer(style: str) -> Tokenizer:
    """Make a small tokenizer as the models of a style have, special tokens included."""
    texts = [message["content"] for chat in CONVERSATIONS for message in chat] * 3
    tokenizer = Tokenizer(models.BPE(byte_fallback=style in ("mistral", "gemma"), unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if style in ("mistral", "gemma"):  # as SentencePiece does
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if style in ("mistral", "gemma") else []
    trainer = trainers.BpeTrainer(
        vocab_size=400 + len(pieces),
        special_tokens=[*STYLES[style]["specials"], *pieces],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if pieces:  # bytes are not special tokens
        stored = json.loads(tokenizer.to_str())
        stored["added_tokens"] = [one for one in stored["added_tokens"] if one["content"] not in set(pieces)]
        tokenizer = Tokenizer.from_str(json.dumps(stored))
    if bos := STYLES[style].get("bos"):
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def transformers_tokenizer(style: str, template: str | None = None) -> Any:
    """Make the same tokenizer in transformers, with its chat template."""
    import transformers

    names = {f"{name}_token": STYLES[style][name] for name in ("eos", "bos") if name in STYLES[style]}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(style), chat_template=template or TEMPLATES[style], **names
    )


def write_tokenizer(folder: Path, style: str, template: str | None = None) -> Path:
    """Write a tokenizer folder as transformers saves it; return the path of its tokenizer.json."""
    transformers_tokenizer(style, template).save_pretrained(folder)
    return folder / "tokenizer.json"
