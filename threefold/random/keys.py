"""Keys of random streams: what a stream is for, as a number."""

import hashlib


def stream_key(*parts: int | str) -> int:
    """A 63-bit key for the stream named by `parts`; different parts give unrelated keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def signed(value: int, bits: int) -> int:
    """`value` modulo 2**bits as a two's complement number, which is what torch's integers hold."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
