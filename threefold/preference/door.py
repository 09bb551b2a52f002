"""Contributions of preferences to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("huggingface", "report")
HOOKS: Final = {
    "preference_of": "threefold.preference.pairs:preference_of",
    "preference_pairs": "threefold.preference.pairs:PreferencePairs",
    "preferring": "threefold.preference.head:preferring",
    "with_references": "threefold.preference.references:with_references",
}
RULES: Final = {"preferences": "threefold.preference.rules:preference_rules"}
RUN_FILES: Final = {"references": "reference_logps.json"}
