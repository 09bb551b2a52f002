"""Files that start trainings with other systems, in the style of their own examples: `tests/convert/data`."""

import json
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("data")
_NAMES = ("fleet_base.yaml", "fleet.yaml", "fleet_flags.sh", "fleet_logged.yaml", "colossal.txt", "colossal_hybrid.txt")
FLEET_BASE, FLEET, FLEET_FLAGS, LOGGED_RUN, COLOSSAL, HYBRID_GPT = ((_DATA / name).read_text() for name in _NAMES)
MEGATRON, LLAMA = (_DATA / "megatron.sh").read_text(), (_DATA / "megatron_llama.txt").read_text()
MEGATRON_SCRIPTS = {path.stem: path.read_text() for path in (_DATA / "megatron").glob("*.*") if path.suffix != ".json"}
"""Short scripts in each form that Megatron-LM's examples have, by name."""
MEGATRON_EXPECTED: dict[str, dict[str, Any]] = json.loads((_DATA / "megatron" / "expected.json").read_text())
"""By script: settings that the config must have, and flags that change the training and have no counterpart."""
EXPECTED: dict[str, dict[str, Any]] = json.loads((_DATA / "expected.json").read_text())
"""By file: settings that the config must have, and what is noted of the others."""
