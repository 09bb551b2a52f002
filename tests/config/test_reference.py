from pathlib import Path

from threefold.config.reference import markdown
from threefold.config.schema import section_settings

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_setting_is_described() -> None:
    for section, settings in section_settings().items():
        for key, field in settings.items():
            assert (field.description or "").endswith("."), f"{section}.{key}"
