"""Reading damaged and strange files: a sentence each, at once."""

import json
import os
from pathlib import Path

import pytest

import threefold
from threefold.checksums import checksum, checksum_of, checksum_of_blocks, checksums, is_intact, seal, seal_text, unseal
from threefold.errors import UserError
from threefold.files import load_json, read_bytes, read_json, read_text, require_file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b'{"a": 1}}', "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 101 + b"]" * 101, "nested too deeply"),
        (b'{"a":' * 900 + b"0" + b"}" * 900, "nested too deeply"),
        (b"9" * 10_000, "digits"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"", "is not JSON"),
    ],
)
def test_damaged_json_is_refused_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_is_read_by_one_function() -> None:
    """Others would pass on values so deep that what reads them exceeds Python's limit of calls; only what a process of
    ours has sent or holds in memory is read without it."""
    assert load_json("[" * 100 + "]" * 100 + " ") is not None
    assert load_json(json.dumps([{"a": "[" * 1000}] * 1000))[0] == {"a": "[" * 1000}
    package = Path(threefold.__file__).parent
    found = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "json.loads(" in path.read_text()
    }
    inside = {"resilience/agreement.py", "resilience/rank_state.py", "cpu/segments.py", "files.py"}
    watches = {"resilience/states_in_memory.py", "resilience/rank_watch.py"}
    assert found == inside | watches | {"huggingface/limited.py", "huggingface/tokenizer_trial.py"}


def test_what_is_no_file_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, said in (
        (tmp_path / "fifo", "no regular file"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "missing", "No such file"),
        (tmp_path / ("x" * 5000), "File name too long"),
        (tmp_path / "a\0b", "NUL"),
    ):
        for read in (require_file, read_bytes, read_text, read_json):
            with pytest.raises(UserError, match=said) as caught:
                read(path, "the config ")
            assert len(str(caught.value)) < 400
            assert "\0" not in str(caught.value)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert read_bytes(path, limit=5) == b"12345"
    with pytest.raises(UserError, match="5 bytes and 4 are allowed"):
        read_bytes(path, limit=4)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1]}')
    assert read_json(path) == {"a": [1]}


def test_every_flipped_bit_changes_the_checksum(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8
    path = tmp_path / "data"
    path.write_bytes(content)
    whole, read = checksum_of(content), []
    assert checksum(path, read.append) == whole
    assert sum(read) == len(content)
    assert checksums([path, path]) == [whole, whole]
    assert whole.startswith("xxh3_128:")
    for bit in range(0, len(content) * 8, 97):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        assert checksum_of(bytes(damaged)) != whole


def test_a_file_is_summed_to_its_end(tmp_path: Path) -> None:
    """It is read in blocks, of which the last is shorter and must not have the end of the one before it."""
    path, sizes = tmp_path / "large", list[int]()
    path.write_bytes(content := os.urandom(1 << 20) * 9 + b"end")
    assert checksum(path, sizes.append) == checksum_of(content) == checksum_of_blocks([content[:77], content[77:]])
    assert sum(sizes) == len(content)
    assert len(sizes) > 1


def test_a_sealed_text_is_intact_to_its_last_letter() -> None:
    text = seal_text('{\n  "a": 1\n}\n')
    assert is_intact(text)
    json.loads(text)
    for wrong in (
        text + "more",
        text + "\n",
        text[:-1],
        text.replace("1", "2", 1),
        text.replace('"a"', '"b"'),
        "",
        "{}",
    ):
        assert not is_intact(wrong), wrong
    assert not is_intact(text + text)
    assert not is_intact(f"mine {text}")


def test_sealed_members_are_known_in_any_order() -> None:
    sealed = seal({"a": 1, "b": [2]})
    assert unseal(dict(reversed(sealed.items()))) == {"a": 1, "b": [2]}
    assert unseal({**sealed, "c": 3}) is None
    assert unseal({**sealed, "a": 2}) is None
    assert unseal({"a": 1, "b": [2]}) is None
