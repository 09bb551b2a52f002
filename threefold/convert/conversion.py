"""Conversion of configs of Megatron-LM, PaddleFleetX and Colossal-AI: detect the system, map its settings, check them.

Each system has a module with `read(path)` and `fill(mapping, world_size)`.
"""

import ast
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from threefold.config.loading import config_of, known_keys
from threefold.config.resolve import resolve
from threefold.config.schema import Config, section_settings, to_yaml
from threefold.convert import colossal, megatron, paddlefleetx
from threefold.convert.key_mapping import Unmapped, foreign_text, parsed, shortened
from threefold.errors import UserError

Kind = Literal["fleet", "colossal", "megatron"]
_FLEET_FLAG: Final = re.compile(
    r"(?<![\w-])--(?:[mdp]p_degree|sharding_degree|sharding_stage|(?:tensor|pipeline|sharding)_parallel_degree)\b"
)
_FLEET_OPTION: Final = re.compile(r"(?<!\S)-o\s+['\"]?(?:Global|Engine|Model|Distributed|Data|Optimizer)\.")
_FLEET_CONFIG: Final = re.compile(r"(?<!\S)-c\s+\S+\.ya?ml(?!\S)")
_FLEET_LAUNCH: Final = re.compile(r"\bpaddle\.distributed\.(?:fleet\.)?launch\b|\bfleetrun\b")
_FLAG: Final = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_COMMENT: Final = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_COLOSSAL_NAMES: Final = (
    "CONFIG BATCH_SIZE NUM_MICRO_BATCHES parallel zero fp16 gradient_accumulation clip_grad_norm TENSOR_SHAPE "
    "gradient_clipping TENSOR_PARALLEL TENSOR_PARALLEL_SIZE SEQ_LEN NUM_EPOCHS"
)


def detected(path: Path) -> tuple[Kind, str]:
    """Return the system of a file and how it was detected, by its name if by nothing else; UserError if unreadable."""
    text = foreign_text(path)
    shell = text.startswith("#!")
    if not shell and (model_args := megatron.MODEL_ARGS.search(text)):
        return "megatron", f"its section {model_args[0].rstrip(': ')}"
    if not shell and (section := paddlefleetx.SECTION.search(text)):
        return "fleet", f"its section {section[1]}"
    if not shell:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            statements = [each for each in ast.iter_child_nodes(parsed(text)) if isinstance(each, ast.Assign)]
            names = [target.id for each in statements for target in each.targets if isinstance(target, ast.Name)]
            if known := [name for name in names if name in _COLOSSAL_NAMES.split()]:
                return "colossal", f"its setting {known[0]}"
    plain = _COMMENT.sub("", text)
    for pattern in (_FLEET_FLAG, _FLEET_OPTION, _FLEET_LAUNCH, _FLEET_CONFIG):
        if found := pattern.search(plain):
            return "fleet", f"its {' '.join(found[0].split())}"
    if flag := _FLAG.search(plain):
        return "megatron", f"its flags, such as {flag[0]}"
    endings: dict[str, Kind] = {".yaml": "fleet", ".yml": "fleet", ".py": "colossal"}
    return endings.get(path.suffix.lower(), "megatron"), f"its name, {path.name}"


KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_PLACE_OF_DATA: Final = "tokens"
_SYSTEMS: Final = {
    "fleet": ("PaddlePaddle Fleet", paddlefleetx),
    "colossal": ("Colossal-AI", colossal),
    "megatron": ("Megatron-LM", megatron),
}
"""Name of each system, and its module with `read(path)` and `fill(mapping, world_size)`."""


class Converted(NamedTuple):
    """Converted config, with our settings that are not the default."""

    kind: Kind
    evidence: str  # how the system was detected; empty if the caller gave it
    sections: dict[str, dict[str, Any]]
    notes: list[Unmapped]  # foreign settings without an exact counterpart
    invalid: str  # why the config is invalid, in one sentence; empty if it is valid
    unset: dict[str, str]  # settings of ours that a run needs but the file does not give → what to set

    @property
    def unsupported(self) -> list[Unmapped]:
        """Notes on settings that are left out but change the training, or that are unknown."""
        return [note for note in self.notes if note.unsupported]

    def to_yaml(self) -> str:
        """Format our settings as YAML for `load_config`, with comments at its head about what must still be set."""
        head = (f"# Still to be set: {key}: {what}.\n" for key, what in self.unset.items())
        return "".join(head) + to_yaml(self.sections)


def convert(path: Path, kind: Kind | None = None, world_size: int | None = None) -> Converted:
    """Convert a config file of another system; raise a `UserError` if it cannot be read, or a value in it is invalid.

    The system is detected from the content if `kind` is None. From `world_size`, the number of ranks, follows
    `parallel.dp` if the file does not set it.
    """
    try:
        return _converted(path, kind, world_size)
    except UserError as error:  # may quote a long part of a damaged file
        raise UserError(shortened(str(error), 800)) from None
    except RecursionError:
        raise UserError(f"{path}: it is nested too deeply to be read.") from None


def _converted(path: Path, kind: Kind | None, world_size: int | None) -> Converted:
    evidence = ""
    if kind is None:
        kind, evidence = detected(path)
    _, system = _SYSTEMS[kind]
    mapping = system.read(path)
    system.fill(mapping, world_size)
    if not {"data.path", "data.mixture"} & mapping.settings.keys():
        mapping.put("data.path", _PLACE_OF_DATA)
        mapping.note("data", "not given", f"data.path {_PLACE_OF_DATA} is a placeholder for your folder or token files")
    try:
        config = config_of({}, {key: mapping.settings[key] for key in known_keys() if key in mapping.settings})
    except UserError as error:
        raise UserError(f"{mapping.where}: {error}") from None
    differing: dict[str, dict[str, Any]] = {}
    for name, known in section_settings().items():
        for key, value in getattr(config, name).settings().items():
            default = known[key].default
            default = list(default) if isinstance(default, tuple) else default
            if f"{name}.{key}" in mapping.settings and value != default:
                differing.setdefault(name, {})[key] = value
    invalid = ""
    try:
        resolve(config, config.model.vocab_size or 50257)
    except UserError as error:
        invalid = str(error)
    return Converted(kind, evidence, differing, mapping.notes, invalid, _unset(config))


def unmapped_lines(converted: Converted, path: Path) -> list[str]:
    """Return lines with the detected system, what must still be set, and all notes, unsupported settings first."""
    whose, _ = _SYSTEMS[converted.kind]
    lines = [f"{path} is taken for {whose}'s" + (f" by {converted.evidence}." if converted.evidence else ".")]
    if converted.unset:
        lines += ["", "Still to be set:", *(f"  {key}: {what}" for key, what in converted.unset.items())]
    others = [note for note in converted.notes if not note.unsupported]
    for title, notes in (("Unsupported:", converted.unsupported), ("Without an exact counterpart:", others)):
        lines += ["", title] if notes else []
        for note in notes:
            shown = shortened(" ".join(map(str, note.value)) if isinstance(note.value, list) else str(note.value))
            value = "(not given)" if note.value == "not given" else f"= {shown}"
            lines.append(f"  {shortened(note.key)} {value}: {note.reason}")
    return lines


def _unset(config: Config) -> dict[str, str]:
    paths = list(config.data.corpora)
    if paths == [_PLACE_OF_DATA]:  # whose data determines the vocabulary
        return {"data.path": f"{_PLACE_OF_DATA} is a placeholder; name your folder or token files"}
    found: dict[str, str] = {}
    if open_paths := [path for path in paths if "$" in path or "<" in path]:
        key = "data.path" if config.data.mixture is None else "data.mixture"
        found[key] = f"{shortened(open_paths[0])} is not a path; put your own in its place"
    if config.model.vocab_size is None and config.data.tokenizer is None:
        found["model.vocab_size"] = "the number of token ids, which token files of other systems do not state"
    return found
