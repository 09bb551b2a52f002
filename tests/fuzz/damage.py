"""Damages that disks, copying, editors and malice do to files, each a function of a seed alone."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_BLOCK: Final = 64


@dataclass(frozen=True)
class Damage:
    """One way to damage one file.

    Attributes:
        name: of the way.
        apply: damages the file at a path.
        of_json: whether it is for JSON files alone.
    """

    name: str
    apply: Callable[[Path, random.Random], None]
    of_json: bool = False


def flip_bit(path: Path, choose: random.Random) -> None:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    if content:
        bit = choose.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)


def damaged_file(folder: Path, number: int, seed: str) -> str:
    """Damage one file in `folder`, as the case's number and the seed say, and return what was done to which."""
    choose = random.Random(f"{seed} {number}")
    path = choose.choice(_files(folder))
    fitting = [damage for damage in DAMAGES if not damage.of_json or _holds_json(path)]
    damage = fitting[number % len(fitting)]
    damage.apply(path, choose)
    return f"{damage.name} of {path.relative_to(folder)}"


def flipped_file(folder: Path, number: int, seed: str) -> str:
    """Flip one bit in one file in `folder`; each byte of the folder is as likely as any other in half of the cases."""
    choose = random.Random(f"{seed} flip {number}")
    files = _files(folder)
    sizes = [path.stat().st_size for path in files] if number % 2 else [1] * len(files)
    (path,) = choose.choices(files, sizes)
    flip_bit(path, choose)
    return f"one flipped bit in {path.relative_to(folder)}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _holds_json(path: Path) -> bool:
    return path.suffix == ".json"


def _truncate(path: Path, choose: random.Random) -> None:
    os.truncate(path, choose.randrange(max(1, path.stat().st_size)))


def _cut_tail(path: Path, choose: random.Random) -> None:
    os.truncate(path, max(0, path.stat().st_size - choose.randint(1, 8)))


def _empty(path: Path, choose: random.Random) -> None:
    os.truncate(path, 0)


def _extend(path: Path, choose: random.Random) -> None:
    with path.open("ab") as file:
        file.write(choose.randbytes(choose.randint(1, 200)))


def _extend_with_zeros(path: Path, choose: random.Random) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def _overwrite(path: Path, block: Callable[[int], bytes], choose: random.Random) -> None:
    content = bytearray(path.read_bytes())
    size = min(len(content), _BLOCK)
    start = choose.randrange(max(1, len(content) - size + 1))
    content[start : start + size] = block(size)
    path.write_bytes(content)


def _swap_blocks(path: Path, choose: random.Random) -> None:
    content = path.read_bytes()
    size = max(1, len(content) // 4)
    first, second = content[:size], content[size : 2 * size]
    path.write_bytes(second + first + content[2 * size :])


def _remove_middle(path: Path, choose: random.Random) -> None:
    content = path.read_bytes()
    start = choose.randrange(max(1, len(content)))
    path.write_bytes(content[:start] + content[start + choose.randint(1, 16) :])


def _replace(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def apply(path: Path, choose: random.Random) -> None:
        path.unlink()
        make(path)

    return apply


def _exchange(path: Path, choose: random.Random) -> None:
    """Another file of the folder lies under its name."""
    others = [other for other in _files(path.parent) if other != path]
    if not others:
        path.unlink()
        return
    shutil.copyfile(choose.choice(others), path)


_VALUES: Final[tuple[Any, ...]] = (
    None,
    [],
    {},
    "x",
    "",
    -1,
    0,
    1.5,
    True,
    10**30,
    1e308,
    [[1]],
    {"a": 1},
    "../../../etc/passwd",
    "\u0000",
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with one of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _edit_json(edit: Callable[[Any, Any, random.Random], None]) -> Callable[[Path, random.Random], None]:
    def apply(path: Path, choose: random.Random) -> None:
        document = json.loads(path.read_text())
        container, key = choose.choice(list(_places(document)))
        edit(container, key, choose)
        path.write_text(json.dumps(document))

    return apply


def _other_value(container: Any, key: Any, choose: random.Random) -> None:
    container[key] = choose.choice(_VALUES)


def _no_value(container: Any, key: Any, choose: random.Random) -> None:
    del container[key]


def _unknown_key(container: Any, key: Any, choose: random.Random) -> None:
    if isinstance(container, dict):
        container["unknown"] = container[key]
    else:
        container.append(container[key])


def _near_value(container: Any, key: Any, choose: random.Random) -> None:
    value = container[key]
    if isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, int | float):
        container[key] = value + choose.choice((-1, 1))
    elif isinstance(value, str):
        container[key] = value[::-1] if value[::-1] != value else value + "x"
    else:
        container[key] = [value]


def _nest_json(path: Path, choose: random.Random) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


DAMAGES: Final = (
    Damage("a truncation", _truncate),
    Damage("a JSON value of another type", _edit_json(_other_value), of_json=True),
    Damage("a short tail", _cut_tail),
    Damage("a JSON value beside the right one", _edit_json(_near_value), of_json=True),
    Damage("an empty file in place", _empty),
    Damage("random bytes at the end", _extend),
    Damage("a lost JSON key", _edit_json(_no_value), of_json=True),
    Damage("zeros at the end", _extend_with_zeros),
    Damage("a block of zeros", lambda path, choose: _overwrite(path, bytes, choose)),
    Damage("a JSON value of another type", _edit_json(_other_value), of_json=True),
    Damage("a block of random bytes", lambda path, choose: _overwrite(path, choose.randbytes, choose)),
    Damage("a block of ones", lambda path, choose: _overwrite(path, lambda size: b"\xff" * size, choose)),
    Damage("an exchange of blocks", _swap_blocks),
    Damage("a JSON value beside the right one", _edit_json(_near_value), of_json=True),
    Damage("lost bytes in the middle", _remove_middle),
    Damage("a copy of its neighbour in place", _exchange),
    Damage("the loss", lambda path, choose: path.unlink()),
    Damage("an unknown JSON key", _edit_json(_unknown_key), of_json=True),
    Damage("a folder in place", _replace(lambda path: path.mkdir())),
    Damage("a FIFO in place", _replace(lambda path: os.mkfifo(path))),
    Damage("an endless device in place", _replace(lambda path: path.symlink_to("/dev/zero"))),
    Damage("a link to itself in place", _replace(lambda path: path.symlink_to(path.name))),
    Damage("JSON nested without end", _nest_json, of_json=True),
)
