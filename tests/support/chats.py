"""Tokenizers with chat templates in published styles, and conversations for them."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
    "{{ bos_token }}"
    "{%- for message in rest %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}"
    "{{- '[INST] ' + (system + '\n\n' if loop.first and system else '') + message['content'] + '[/INST]' }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{%- endif %}{%- endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{% if role == 'model' %}"
    "{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
SPECIALS: dict[str, list[str]] = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    "zephyr": ["<unk>", "<s>", "</s>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
    "phi": ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"],
}
TEMPLATES: dict[str, str] = {
    "chatml": CHATML_MARKED,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "phi": PHI,
}
BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "zephyr": "<s>", "gemma": "<bos>"}
EOS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "zephyr": "</s>",
    "gemma": "<eos>",
    "phi": "<|endoftext|>",
}
TURN_END = EOS | {"gemma": "<end_of_turn>", "phi": "<|end|>"}


def unmarked(template: str) -> str:
    """Return the template without its generation blocks, as most are published."""
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


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
        special_tokens=[*SPECIALS[style], *pieces],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if pieces:  # bytes are not special tokens
        import json

        stored = json.loads(tokenizer.to_str())
        stored["added_tokens"] = [one for one in stored["added_tokens"] if one["content"] not in set(pieces)]
        tokenizer = Tokenizer.from_str(json.dumps(stored))
    if style in BOS:
        bos = BOS[style]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def transformers_tokenizer(style: str, template: str | None = None) -> Any:
    """Make the same tokenizer in transformers, with its chat template."""
    import transformers

    names = {"eos_token": EOS[style]} | ({"bos_token": BOS[style]} if style in BOS else {})
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(style), chat_template=template or TEMPLATES[style], **names
    )


def write_tokenizer(folder: Path, style: str, template: str | None = None) -> Path:
    """Write a tokenizer folder as transformers saves it; return the path of its tokenizer.json."""
    transformers_tokenizer(style, template).save_pretrained(folder)
    return folder / "tokenizer.json"
