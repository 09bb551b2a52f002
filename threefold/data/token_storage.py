"""How tokens are stored on disk: file names and numpy dtypes, the same in prepared folders and in token caches."""

from typing import Final

META_FILE: Final = "meta.json"
TOKENS_FILE: Final = "tokens.bin"
DOCUMENTS_FILE: Final = "documents.bin"
LOSS_MASK_FILE: Final = "loss_mask.bin"
TOKENIZER_FILE: Final = "tokenizer.json"

DOCUMENT_DTYPE: Final = "<i8"
# The bound of the Fleet token files, kept so that the same vocabulary has the same type in both.
_UINT16_VOCAB: Final = 65_500
DTYPES: Final = {"uint16": "<u2", "int32": "<i4"}


def dtype_for(vocab_size: int) -> str:
    """Name of the type that tokens of this vocabulary are stored in: a key of `DTYPES`."""
    return "uint16" if vocab_size < _UINT16_VOCAB else "int32"
