"""Settings of the public GPT and Llama examples of other systems, as facts: key → value, in each form that they have.

They are in `data/public_configs.json`, a line for each example. Fleet's and Colossal-AI's keys are dotted; Megatron-LM's
and PaddleNLP's are flags, where true stands for a flag without a value.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Settings = dict[str, Any]
FILE = Path(__file__).parent / "data" / "public_configs.json"


class Case(NamedTuple):
    """Example, and what the original makes of it, by arithmetic of its own."""

    kind: str  # fleet-yaml, fleet-flags, colossal or megatron
    settings: Settings
    world: int
    layout: tuple[int, int, int]  # dp · tp · pp
    batch: tuple[int, int]  # sequences of a step and of a micro-batch
    parameters: int
    unsupported: tuple[str, ...] = ()


def _read(facts: dict[str, Any]) -> Case:
    return Case(**{key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()})


CASES = {name: _read(facts) for name, facts in json.loads(FILE.read_text(encoding="utf-8")).items()}


def written(kind: str, settings: Settings) -> tuple[str, str]:
    """Return the name and the text of a file with these settings."""
    if kind == "fleet-yaml":
        return "config.yaml", yaml.safe_dump(_nested(settings), sort_keys=False)
    if kind == "colossal":
        lines = [f"{name} = {_python(value)}" for name, value in _nested(settings).items()]
        return "config.py", "\n".join(lines) + "\n"
    command = (
        "torchrun pretrain_gpt.py" if kind == "megatron" else "python -m paddle.distributed.launch run_pretrain.py"
    )
    flags = (f"--{name}" if value is True else f"--{name} {_word(value)}" for name, value in settings.items())
    return "train.sh", f"#!/bin/bash\n{command} \\\n    " + " \\\n    ".join(flags) + "\n"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f'"{value}"' if isinstance(value, str) and " " in value else str(value)


def _nested(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return found


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return f"dict({', '.join(f'{name}={_python(part)}' for name, part in value.items())})"
    return value if isinstance(value, str) and not value[:1].isdecimal() else repr(value)
