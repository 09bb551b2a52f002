"""Parameter groups by patterns, for optimizers of torch in custom training loops."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from threefold.errors import UserError
from threefold.files import shown
from threefold.models.groups import last_match
from threefold.models.sharding import covers
from threefold.plugins import one_of


def grouped(
    weights: Mapping[str, Tensor], names: Sequence[str], groups: Sequence[Mapping[str, Any]], lr: float | None
) -> list[dict[str, Any]]:
    """Return groups of this rank's `weights`, given the `names` of all ranks'; see `parameter_groups`."""
    patterns = [_pattern(number, group, lr) for number, group in enumerate(groups, 1)]
    places = {name: last_match(patterns, name) for name in names}
    for number, pattern in enumerate(patterns, 1):
        if number in places.values():
            continue
        if matched := next((name for name in names if covers(pattern, name)), None):
            why = f"of which later groups match all weights, such as {matched}; put it after them, or leave it out"
        else:
            why = f"which matches no weight; the nearest name is {one_of(pattern, list(names)).rpartition(' ')[2]}"
        raise UserError(f"groups has {shown(pattern)} as group {number}, {why}.")
    found: list[dict[str, Any]] = [{"params": []}, *({"params": [], **_options(group, lr)} for group in groups)]
    for name, weight in weights.items():
        found[places[name]]["params"].append(weight)
    return found


def _pattern(number: int, group: Mapping[str, Any], lr: float | None) -> str:
    pattern = group.get("match")
    if not isinstance(pattern, str) or not pattern or len(group) == 1 or "params" in group:
        raise UserError(
            f"groups has {shown(repr(dict(group)))} as group {number} but must have a match and options for it, such "
            "as {'match': '**.bias', 'weight_decay': 0.0}."
        )
    if "lr_scale" in group and lr is None:
        raise UserError(
            f"groups has an lr_scale in group {number}, and lr is not given; give the rate that it multiplies."
        )
    return pattern


def _options(group: Mapping[str, Any], lr: float | None) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "match"}
    return options if lr is None or "lr_scale" not in group else {"lr": lr * float(group["lr_scale"]), **options}
