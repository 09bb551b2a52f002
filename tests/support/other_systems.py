"""Files of Megatron-LM and Fleet, made byte by byte from the published formats."""

import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

Documents = list[list[list[int]]]

MEGATRON_CODES = {"u1": (1, "B"), "i1": (2, "b"), "i2": (3, "h"), "i4": (4, "i"), "i8": (5, "q"), "u2": (8, "H")}


def megatron_files(documents: Documents, dtype: str = "u2", modes: Sequence[int] | None = None) -> tuple[bytes, bytes]:
    """Return the bytes of PREFIX.bin and PREFIX.idx."""
    code, letter = MEGATRON_CODES[dtype]
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    offsets = [sum(lengths[:i]) * struct.calcsize(letter) for i in range(len(lengths))]
    bounds = [sum(len(document) for document in documents[:i]) for i in range(len(documents) + 1)]
    tokens = [token for sequence in sequences for token in sequence]
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    idx += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(bounds))
    idx += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    idx += struct.pack(f"<{len(bounds)}q", *bounds)
    if modes is not None:
        idx += struct.pack(f"<{len(modes)}b", *modes)
    return struct.pack(f"<{len(tokens)}{letter}", *tokens), idx


def write_megatron(prefix: Path, documents: Documents, dtype: str = "u2", modes: Sequence[int] | None = None) -> Path:
    """Write PREFIX.bin and PREFIX.idx; return the prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for ending, content in zip((".bin", ".idx"), megatron_files(documents, dtype, modes), strict=True):
        Path(f"{prefix}{ending}").write_bytes(content)
    return prefix


def npy(values: Sequence[int | float], dtype: str, shape: str | None = None) -> bytes:
    """Return a .npy file of version 1.0: magic, header length, header padded to 64 bytes, numbers."""
    letter = {"<u2": "H", "<i4": "i", "<i8": "q", "<f4": "f"}[dtype]
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape or f'({len(values)},)'}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    return head + struct.pack(f"<{len(values)}{letter}", *values)


def npz(path: Path, compression: int = zipfile.ZIP_STORED, **members: bytes) -> None:
    """Write a .npz file: a zip file of .npy files."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def fleet_parts(documents: Documents, dtype: str) -> tuple[bytes, bytes, bytes]:
    """Return the documents as `ids`, `lens` and `docs`, each a .npy file."""
    sequences = [sequence for document in documents for sequence in document]
    bounds = [sum(len(document) for document in documents[:i]) for i in range(len(documents) + 1)]
    ids = npy([token for sequence in sequences for token in sequence], dtype)
    return ids, npy([len(sequence) for sequence in sequences], "<i4"), npy(bounds, "<i8")


def write_fleet(prefix: Path, documents: Documents, dtype: str = "<u2") -> Path:
    """Write PREFIX_ids.npy and PREFIX_idx.npz; return the prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    ids, lens, docs = fleet_parts(documents, dtype)
    Path(f"{prefix}_ids.npy").write_bytes(ids)
    npz(Path(f"{prefix}_idx.npz"), lens=lens, docs=docs)
    return prefix


def write_fleet_npz(prefix: Path, documents: Documents, dtype: str = "<u2", packed: bool = False) -> Path:
    """Write PREFIX_ids.npz, compressed if `packed`; return the prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    ids, lens, _ = fleet_parts(documents, dtype)
    npz(Path(f"{prefix}_ids.npz"), zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED, ids=ids, lens=lens)
    return prefix
