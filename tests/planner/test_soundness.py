"""The layouts that the search calls sound are those that a run accepts."""

import random
from pathlib import Path

import pytest

from tests.planner.small_searches import MODELS, base, every_layout, given, space_of
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.schedules import SCHEDULES
from threefold.errors import UserError
from threefold.models.family import model_plan
from threefold.parallel.pipeline.partition import stage_map
from threefold.planner.space import LayoutChoice, RuleAnswers, in_layout, without_layout


def accepted(name: str, choice: LayoutChoice) -> str:
    """The sentence with which a run refuses a layout; empty where it accepts it."""
    sections = without_layout(given(name))
    for key, value in choice.settings().items():
        section, setting = key.split(".")
        sections.setdefault(section, {})[setting] = value
    try:
        resolved = resolve(config_of(sections), 1)
        stage_map(model_plan(resolved.model, resolved.data.sequence_length), resolved)
    except UserError as error:
        return str(error)
    assert in_layout(base(name), choice) == resolved
    return ""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gpus", [4, 6])
def test_sound_layouts_resolve_and_others_are_refused(name: str, gpus: int) -> None:
    layouts = list(every_layout(space_of(base(name)), gpus))
    random.Random(gpus).shuffle(layouts)
    sound = [choice for choice, is_sound in layouts if is_sound]
    unsound = [choice for choice, is_sound in layouts if not is_sound]
    assert len(set(sound)) == len(sound) > 20
    assert unsound
    assert [str(choice) for choice in sound[:60] if accepted(name, choice)] == []
    assert [str(choice) for choice in unsound[:60] if not accepted(name, choice)] == []


def test_a_rule_is_asked_once_for_the_settings_that_it_reads() -> None:
    asked = []

    def rule(config: Config) -> None:
        asked.append(config.parallel.tp)
        if config.parallel.tp > 1 and config.train.recompute == "full":
            raise UserError("parallel.tp is too large.")

    answers = RuleAnswers(rule, base("gpt"))
    layouts = [
        {"parallel.tp": tp, "train.recompute": mode, "parallel.dp": dp}
        for dp in (1, 2, 3)
        for tp in (1, 2)
        for mode in ("none", "full")
    ]
    sentences = [answers.sentence(settings) for settings in layouts]
    assert sentences == ["", "", "", "parallel.tp is too large."] * 3
    assert asked == [1, 2, 2]
    assert answers.read == {"parallel.tp", "train.recompute"}


def test_a_schedule_file_of_the_config_is_among_the_schedules(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    space = space_of(base("gpt"), schedules=[*SCHEDULES, str(path)])
    own = [choice for choice, sound in every_layout(space, 4) if sound and choice.schedule == str(path)]
    assert own
    assert {(choice.pp, choice.accumulation) for choice in own} == {(2, 2)}
