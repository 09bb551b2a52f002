"""What every section of a config has in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


def derived(**limits: Any) -> Any:
    """A setting that `resolve` fills when it is not given."""
    return Field(default=None, **limits)


class Section(BaseModel):
    """Settings that belong together; null in a file means the default."""

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

    def settings(self) -> dict[str, Any]:
        """The settings that have a value, as plain YAML values."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}
