"""Contributions of exact runs to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("cpu",)
HOOKS: Final = {
    "exact_arithmetic": "threefold.exact.arithmetic:exact_arithmetic",
    "hash_of_part": "threefold.exact.tensor_hash:hash_of_part",
    "fingerprint_of": "threefold.exact.tensor_hash:fingerprint_of",
}
RULES: Final = {"exact": "threefold.exact.rules:exact_rules"}
DEFAULTS: Final = {"grain": "threefold.exact.rules:default_grain"}
