"""JSON files whose last member is the checksum of everything before it."""

from threefold.checksums import checksum_of

_MARK = '  "checksum": "'


def seal(document: str) -> str:
    """Add its checksum to the text of a JSON object with members, as the last of them, on a line of its own."""
    body = document.rstrip().removesuffix("}").rstrip() + ",\n"
    return f'{body}{_MARK}{checksum_of(body.encode())}"\n}}\n'


def is_intact(text: str) -> bool:
    """Whether a text is what `seal` returned."""
    body, mark, end = text.rpartition(_MARK)
    return bool(mark) and end == f'{checksum_of(body.encode())}"\n}}\n'
