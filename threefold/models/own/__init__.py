"""The family of models that users bring themselves, as a Python file or as objects of a program."""

from threefold.models.family import Family
from threefold.models.own.config import OwnConfig

FAMILY = Family(
    title="own model",
    config=OwnConfig,
    model="threefold.models.own.model:make_own_model",
    plan="threefold.models.own.model:own_plan",
)
