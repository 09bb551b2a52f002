"""Rules of the `model` section, and which sizes the layout has to divide."""

from math import gcd

from threefold.config.config_error import problem
from threefold.config.divisors import nearest_divisor, nearest_multiple
from threefold.config.model import FAMILIES, OWN
from threefold.config.schema import Config


def check_model(config: Config, vocab_size: int) -> None:
    """Check the sizes of the model.

    Raises:
        UserError: the first rule that is broken.
    """
    model = config.model
    for name, rule in model.broken_rules():
        raise problem(config, f"model.{name}", rule, model.value_of(name))
    if model.vocab_size < vocab_size:
        raise problem(
            config, "model.vocab_size", f"the tokenizer of the data has {vocab_size} tokens; use {vocab_size}"
        )


def check_division(config: Config) -> None:
    """Check that the tensor and the expert axis divide what the family's sharding table says that they divide.

    Raises:
        UserError: the first rule that is broken.
    """
    model, parallel = config.model, config.parallel
    if model.architecture == OWN:  # importing it takes seconds; `parallel.plan_check` checks it
        return _check_expert_axis(config)
    plan = FAMILIES.load(model.architecture).make_plan(model, 1)
    units = plan.units("tp")
    heads = [key for key in units if key.endswith("_heads")]
    for key, unit in units.items():
        if unit.fits(parallel.tp):
            continue
        if key in heads:
            multiple = " or be a multiple of it" if unit.repeated else ""
            nearest = plan.nearest_size("tp", parallel.tp, heads)
            raise problem(config, "parallel.tp", f"must divide model.{key} {unit.count}{multiple}; use {nearest}")
        nearest = nearest_multiple(unit.count, parallel.tp)
        rule = f"must be a multiple of parallel.tp {parallel.tp}; use {nearest}"
        raise problem(config, f"model.{key}", rule)
    if parallel.tp > model.vocab_size:
        raise problem(config, "parallel.tp", f"model.vocab_size is {model.vocab_size}; use at most {model.vocab_size}")
    _check_expert_axis(config)


def _check_expert_axis(config: Config) -> None:
    ep, dp, experts = config.parallel.ep, config.parallel.dp, config.model.num_experts
    if ep == 1:
        return
    if experts == 0:
        raise problem(config, "parallel.ep", "model.num_experts is 0, so there are none to share; use 1")
    works = nearest_divisor(ep, gcd(dp, experts))
    if dp % ep:
        raise problem(config, "parallel.ep", f"must divide parallel.dp {dp}; use {works}")
    if experts % ep:
        raise problem(config, "parallel.ep", f"must divide model.num_experts {experts}; use {works}")
