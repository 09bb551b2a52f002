from pathlib import Path

from threefold.config.reference import markdown
from threefold.config.schema import section_types

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_setting_is_described() -> None:
    for section, kind in section_types().items():
        for key, field in kind.model_fields.items():
            assert (field.description or "").endswith("."), f"{section}.{key}"
