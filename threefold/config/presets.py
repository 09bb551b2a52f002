"""Published sizes of well-known models, from the table `presets.csv`.

GPT-2: Radford et al. 2019 and the released weights. GPT-3: Brown et al. 2020, table 2.1, with the usual corrections of
two misprints: 1.3B has 16 heads (24 do not divide its width), 13B has width 5120 (40 heads of 128). Llama and its
successors: the `config.json` published with the weights. The experts' auxiliary loss weights are left to the run.
"""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from threefold.files import load_json

Sizes = dict[str, Any]
_TEXTS = ("architecture", "rope_scaling", "attention_pattern", "router")  # settings whose values are texts


def _families() -> dict[str, dict[str, Sizes]]:
    families: dict[str, dict[str, Sizes]] = {}
    with open(Path(__file__).with_name("presets.csv"), encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes = families.setdefault(row.pop("family"), {}).setdefault(row.pop("preset"), {})
            texts = ((key, text) for key, text in row.items() if text)
            sizes |= {key: text if key in _TEXTS else load_json(text) for key, text in texts}
    return families


FAMILIES = _families()
"""Family → preset → settings of `model`."""

PRESETS: dict[str, Sizes] = {name: sizes for family in FAMILIES.values() for name, sizes in family.items()}
"""Preset → settings of `model`."""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]
