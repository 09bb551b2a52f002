"""Base class of the sections of a config."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from threefold.config.by_step import plain
from threefold.files import hide_secrets, local_rule, shown, without_secrets
from threefold.plugins import Registry, one_of

MOST_RANKS: Final = 10**6  # limit on the size of a mesh axis
MOST_STEPS: Final = 10**12
MOST_SECONDS: Final = 10**9
MOST_SEQUENCES: Final = 10**9  # limit on the sequences of a step
MOST_TOKENS: Final = 10**8  # limit on the tokens of a sequence
_SMALLEST, _LARGEST = 1.17550e-38, 3.40282e38  # of the normal numbers of fp32, rounded inwards
_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, on Linux


def _require_path(text: str) -> str:
    encoded = text.encode(errors="surrogatepass")
    if b"\0" in encoded or len(encoded) > _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        raise ValueError(f"a path: at most {_LONGEST_PATH} bytes, at most {_LONGEST_NAME} in each name, without NUL")
    if rule := local_rule(text):
        raise PydanticCustomError("local", "{rule}", {"rule": rule})
    return text


def _written(given: Any) -> Any:
    """Return the text of a whole number, as which YAML reads 2024; how 1.50 and on were written is not known."""
    if type(given) is int:
        return str(given)
    if isinstance(given, bool | float):
        raise ValueError("text; write it in quotes, since YAML reads it as something else without")
    return given


Text = Annotated[str, BeforeValidator(_written)]  # text that YAML may read as a number, such as the name of a folder
PathText = Annotated[Text, AfterValidator(_require_path)]  # text that may be the path of a file


_NAMED_SECRET: Final = re.compile(r"(?i)(?:.*_)?(?:password|passwd|secret|api_?key|secret_key|(?:access|auth)_token)")
"""Name of a callback's argument that gives access whatever its value."""
_ELSEWHERE: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws/credentials",
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS, the path of a key file"),
    **dict.fromkeys(("az", "abfs", "abfss"), "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"),
}
"""Environment variables from which file systems of fsspec read what gives access."""


def _require_no_secret(setting: str, given: Any, name: str = "") -> None:
    """Refuse what gives access, in a setting: a run stores its config, also in each checkpoint, and reports show it."""
    if isinstance(given, Mapping):
        for key, each in given.items():
            _require_no_secret(setting, str(key))
            _require_no_secret(setting, each, str(key))
    elif isinstance(given, list | tuple):
        for each in given:
            _require_no_secret(setting, each)
    elif isinstance(given, str) and given:
        kept = "which the config, the checkpoints and the report of a run would keep"
        if _NAMED_SECRET.fullmatch(name):
            rule = f"without it, {kept}; have the callback read it from an environment variable, such as WANDB_API_KEY"
            raise PydanticCustomError("secret", "{rule}", {"rule": rule, "found": name})
        if hide_secrets(given) != given:
            scheme = given.partition(":")[0].lower()
            variables = _ELSEWHERE.get(scheme, f"FSSPEC_{scheme.upper()}_PASSWORD, or in ~/.config/fsspec")
            if setting == "callbacks":
                variables = "the variable that its service reads, such as MLFLOW_TRACKING_URI or WANDB_API_KEY"
            use = shown(without_secrets(given))
            rule = f"an address without password, token and query, {kept}; use {use}, and give the rest by {variables}"
            raise PydanticCustomError("secret", "{rule}", {"rule": rule, "found": shown(given)})


@dataclass(frozen=True)
class NameIn:
    """Annotation of text that names an entry of a registry: `Annotated[str, NameIn(registry)]`."""

    registry: Registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._require, handler(source))

    def _require(self, given: Any) -> Any:
        if not isinstance(given, str) or given not in self.registry:
            raise ValueError(one_of(given, self.registry.names()))
        return given


def derived(**limits: Any) -> Any:
    """Declare a setting that `resolve` fills when it is not given."""
    return Field(default=None, **limits)


class Section(BaseModel):
    """Section of a config; null in a file means the default."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given

    @field_validator("*")
    @classmethod
    def _require_fp32(cls, given: Any) -> Any:
        """Refuse a number that becomes 0 or infinite, or loses its digits, where a run computes with it in fp32."""
        if type(given) is float and given and not _SMALLEST <= abs(given) <= _LARGEST:
            use = f"{math.copysign(_LARGEST if abs(given) > _LARGEST else _SMALLEST, given):g}"
            raise ValueError(f"0 or between {_SMALLEST:g} and {_LARGEST:g} in size, as in fp32; use {use}")
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_secrets(cls, given: Any, setting: ValidationInfo) -> Any:
        name = str(setting.field_name)
        kind = cls.model_fields[name].annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)):  # whose own settings are looked at
            _require_no_secret(name, given)
        return given

    def settings(self) -> dict[str, Any]:
        """Return the settings that have a value, as plain YAML values."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        return {k: list(v) if isinstance(v, tuple) else plain(v) for k, v in values.items() if v is not None}


def nearest_multiple(value: int, divisor: int) -> int:
    """Return the positive multiple of `divisor` nearest to `value`."""
    return max(1, round(value / divisor)) * divisor


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending, in time proportional to its square root."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return small + large


def nearest_divisor(value: int, number: int) -> int:
    """Return the divisor of `number` nearest to `value`; the smaller one in a tie."""
    return min(divisors(number), key=lambda divisor: (abs(divisor - value), divisor))
