"""The bounds of the search against the exact costs, and the search with these against an exhaustive one."""

import random
from typing import Any

import numpy as np
import pytest

from tests.planner.small_searches import every_layout, rules_of
from threefold.config.loading import config_of
from threefold.config.schedules import SCHEDULES
from threefold.planner.bounds import ModelCosts
from threefold.planner.estimate import estimate
from threefold.planner.hardware import find_hardware
from threefold.planner.planning import OBJECTIVES, Request, read_request
from threefold.planner.search import BEST, Soundness, search
from threefold.planner.space import in_layout

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt": ("h100", 64, {"model": {"preset": "gpt3-13b"}, "data": {"path": "x", "sequence_length": 2048}}),
    "experts": ("a100-80", 16, {"model": {"preset": "mixtral-8x7b"}, "data": {"path": "x", "sequence_length": 4096}}),
    "llama": ("h200", 16, {"model": {"preset": "llama-3.1-8b"}, "data": {"path": "x", "sequence_length": 8192}}),
    "latent": (
        "h200",
        16,
        {"model": {"preset": "deepseek-v2-lite", "mtp_layers": 1}, "data": {"path": "x", "sequence_length": 4096}},
    ),
    "adapters": (
        "h200",
        16,
        {"model": {"preset": "llama-3.1-8b"}, "data": {"path": "x", "sequence_length": 4096}, "adapter": {"rank": 16}},
    ),
    "further": (
        "h200",
        16,
        {"model": {"preset": "llama-3.1-8b", "mtp_layers": 1}, "data": {"path": "x", "sequence_length": 4096}},
    ),
}


def request_of(name: str, batch: int = 48, system: str | None = None, **fixed: str) -> Request:
    hardware, gpus, sections = MODELS[name]
    given = config_of(
        {**sections, "train": {"global_batch_size": batch, "max_steps": 10}, "precision": {"dtype": "bf16"}}
    )
    fix = [f"{key.replace('__', '.')}={value}" for key, value in fixed.items()]
    return read_request(given, gpus, find_hardware(hardware), "throughput", fix, None, system)


@pytest.mark.parametrize(("name", "system"), [*((name, None) for name in MODELS), ("llama", "nemo")])
def test_no_layout_takes_less_than_its_bounds(name: str, system: str | None) -> None:
    request = request_of(name, system=system)
    costs, space, draw = (
        ModelCosts(request.config, request.hardware, request.system),
        request.space({}),
        random.Random(1),
    )
    soundness, meshes, ratios = Soundness(space, rules_of(request.config)), list(space.meshes(request.gpus)), []
    while len(ratios) < 25:
        mesh = draw.choice(meshes)
        options = space.options(mesh)
        mask = soundness.mask(mesh, options)
        if mask is None:
            continue
        wanted = np.broadcast_to(mask, options.shape)
        place = tuple(draw.choice(np.argwhere(wanted)))
        choice = options.choice(mesh, place)
        exact = costs.evaluate(choice)
        bytes_, seconds = costs.least_bytes(mesh, options)[place], costs.least_seconds(mesh, options, wanted)[place]
        assert bytes_ <= exact.peak * (1 + 1e-9), choice
        frozen = name == "adapters" and choice.zero == 3  # whose gathers of frozen weights the bound leaves out
        if SCHEDULES[choice.schedule].defers_weight_gradients or frozen:
            assert 0.5 * exact.seconds < seconds <= exact.seconds * (1 + 1e-9), choice
        else:
            assert seconds == pytest.approx(exact.seconds, rel=1e-9), choice
        ratios.append(exact.peak / bytes_)
    assert np.median(ratios) < 1.1


@pytest.mark.slow
def test_the_best_are_those_of_an_exhaustive_evaluation() -> None:
    fixed = {"parallel.schedule": "1f1b", "train.recompute": "selective"}
    request = request_of("llama", 16, **{key.replace(".", "__"): value for key, value in fixed.items()})
    costs, space = ModelCosts(request.config, request.hardware, request.system), request.space(fixed)
    found = search(space, rules_of(request.config), costs, [16], OBJECTIVES["throughput"].weight)
    every = [costs.evaluate(choice) for choice, sound in every_layout(space, 16) if sound]
    fitting = [each for each in every if each.peak <= costs.usable_bytes(16)]
    best = sorted(fitting, key=lambda each: (each.seconds, each.peak, each.choice))[:BEST]
    assert [each.choice for each in found.ranked] == [each.choice for each in best]
    assert len(fitting) <= found.fitting < found.sound == len(every)
    assert found.evaluated < len(fitting)


def test_a_layout_costs_what_estimate_says() -> None:
    request = request_of("gpt", parallel__tp="2", parallel__cp="1", train__recompute="full")
    found = search(
        request.space(request.fixed),
        rules_of(request.config),
        ModelCosts(request.config, request.hardware, request.system),
        [64],
        OBJECTIVES["throughput"].weight,
    )
    best = found.ranked[0]
    told = estimate(in_layout(request.config, best.choice), request.hardware, "own")
    assert (best.seconds, best.tokens_per_second, best.mfu) == (told.step_seconds, told.tokens_per_second, told.mfu)
    assert list(best.peak_bytes) == told.peak_bytes
    assert told.fits
