"""Compatibility of features, as data: the checks of a config and the table in the docs are made of the same rules.

A pair of features that no rule names is supported, and the test suite runs it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from threefold.config.config_error import problem
from threefold.config.schema import Config


@dataclass(frozen=True)
class Rule:
    """Two features that cannot be combined.

    Attributes:
        first, second: their names in the table (`features.py` has them all).
        key: the setting that the error is about, `section.name`.
        broken: whether a resolved config breaks the rule.
        reason: what follows 'but' in the error: why not, and what to use instead; `{config}` fields are filled in.
    """

    first: str
    second: str
    key: str
    broken: Callable[[Config], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        "zero",
        "zero-bubble",
        "parallel.zero",
        lambda config: config.parallel.zero > 0 and config.parallel.pipeline_schedule.defers_weight_gradients,
        "parallel.schedule {config.parallel.schedule} defers weight gradients until after their layer's backward pass, "
        "at whose end fully_shard reduce-scatters them; use 0 or schedule interleaved",
    ),
    Rule(
        "compression",
        "zero",
        "parallel.gradient_compression",
        lambda config: config.parallel.gradient_compression != "none" and config.parallel.zero > 0,
        "parallel.zero is {config.parallel.zero}, which would also add the micro-batches up in 16 bits; use none or "
        "parallel.zero 0",
    ),
    Rule(
        "compression",
        "pure-bf16",
        "parallel.gradient_compression",
        lambda config: config.parallel.gradient_compression != "none" and not config.precision.master_weights,
        "precision.master_weights is false, so the gradients have 16 bits already; use none or master_weights true",
    ),
)


def check_together(config: Config) -> None:
    """Check that the features of a resolved config can be combined.

    Raises:
        UserError: the first rule that is broken.
    """
    for rule in RULES:
        if rule.broken(config):
            raise problem(config, rule.key, rule.reason.format(config=config))
