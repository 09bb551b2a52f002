"""A tokenizer of words w0, w1, … whose ids are their numbers."""

from tokenizers import Tokenizer, models


def words(size: int, end: str | None = None, end_id: int = 0) -> Tokenizer:
    """So many words; `end` is the name of the one that ends documents, in place of its number's."""
    ids = {end if end is not None and i == end_id else f"w{i}": i for i in range(size)}
    return Tokenizer(models.WordLevel(ids, unk_token="w1"))
