"""Detection of the system of a config file, from its content."""

import ast
import re
from pathlib import Path
from typing import Final, Literal

from threefold.config.convert.key_mapping import foreign_text
from threefold.config.convert.shell.arithmetic import parsed

Kind = Literal["fleet", "colossal", "megatron"]
_ENDINGS: Final[dict[str, Kind]] = {".yaml": "fleet", ".yml": "fleet", ".py": "colossal"}
_FLEET_SECTION: Final = re.compile(r"^(Global|Engine|Model|Distributed|Data|Optimizer|_base_)[ \t]*:", re.MULTILINE)
_MODEL_ARGS: Final = re.compile(r"^MODEL_ARGS[ \t]*:", re.MULTILINE)
_FLEET_FLAG: Final = re.compile(
    r"(?<![\w-])--(?:[mdp]p_degree|sharding_degree|sharding_stage|(?:tensor|pipeline|sharding)_parallel_degree)\b"
)
_FLEET_OPTION: Final = re.compile(r"(?<!\S)-o\s+['\"]?(?:Global|Engine|Model|Distributed|Data|Optimizer)\.")
_FLEET_LAUNCH: Final = re.compile(r"\bpaddle\.distributed\.(?:fleet\.)?launch\b|\bfleetrun\b")
_FLAG: Final = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_COMMENT: Final = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_COLOSSAL_NAMES: Final = frozenset(
    (
        "CONFIG",
        "BATCH_SIZE",
        "NUM_MICRO_BATCHES",
        "parallel",
        "zero",
        "fp16",
        "gradient_accumulation",
        "clip_grad_norm",
        "TENSOR_SHAPE",
        "gradient_clipping",
        "TENSOR_PARALLEL",
        "TENSOR_PARALLEL_SIZE",
        "SEQ_LEN",
        "NUM_EPOCHS",
    )
)


def detected(path: Path) -> tuple[Kind, str]:
    """The system of a file, and how it was detected.

    A file without content of any system is classified by its name, so that the reader of that system reports the error.

    Raises:
        UserError: it cannot be read.
    """
    text = foreign_text(path)
    shell = text.startswith("#!")
    if not shell and (model_args := _MODEL_ARGS.search(text)):
        return "megatron", f"its section {model_args[0].rstrip(': ')}"
    if not shell and (section := _FLEET_SECTION.search(text)):
        return "fleet", f"its section {section[1]}"
    if not shell and (name := _colossal(text)):
        return "colossal", f"its {name}"
    plain = _COMMENT.sub("", text)
    for pattern in (_FLEET_FLAG, _FLEET_OPTION, _FLEET_LAUNCH):
        if found := pattern.search(plain):
            return "fleet", f"its {' '.join(found[0].split())}"
    if flag := _FLAG.search(plain):
        return "megatron", f"its flags, such as {flag[0]}"
    return _ENDINGS.get(path.suffix.lower(), "megatron"), f"its name, {path.name}"


def _colossal(text: str) -> str:
    """The name of a Colossal-AI setting that a Python file assigns; empty where there is none."""
    try:
        body = ast.iter_child_nodes(parsed(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id in _COLOSSAL_NAMES:
                return f"setting {target.id}"
    return ""
