from threefold.config.schema import section_settings
from threefold.planner.reference import markdown


def test_the_page_has_every_setting() -> None:
    sections = {part.partition("`")[0]: part for part in markdown().split("\n## `")[1:]}
    lost = [
        f"{section}.{key}"
        for section, settings in section_settings().items()
        for key in settings
        if f"| `{key}` |" not in sections.get(section, "")
    ]
    assert lost == []


def test_every_setting_is_described() -> None:
    for section, settings in section_settings().items():
        for key, field in settings.items():
            assert (field.description or "").endswith("."), f"{section}.{key}"
