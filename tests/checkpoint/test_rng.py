"""Streams for models that draw in sequence: who agrees with whom, and that they resume from a checkpoint."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.support.parity import Case, shard_of
from tests.train.support import Run, engine_of, losses_of, train_rank
from threefold.checkpoint.folder import newest
from threefold.checkpoint.tensors import stored_tensors
from threefold.comm.layout import Coordinates, Layout
from threefold.comm.mesh import Mesh
from threefold.config import ModelConfig
from threefold.models import source
from threefold.models.gpt.model import GPT, Block
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.random.rng import STREAMS, RandomStreams
from threefold.train.state import restore_engine
from threefold.train.step import Engine


def streams(tp: int, cp: int = 0) -> RandomStreams:
    return RandomStreams(7, Coordinates(dp=1, pp=0, cp=cp, tp=tp))


def draw(random: RandomStreams, name: str) -> Tensor:
    with random.fork(name):
        return torch.rand(5)


def test_global_stream_agrees_in_a_tensor_group_and_local_differs() -> None:
    ranks = [streams(tp) for tp in range(4)]
    together = [draw(random, "global") for random in ranks]
    apart = [draw(random, "local") for random in ranks]
    assert all(torch.equal(drawn, together[0]) for drawn in together)
    assert len({tuple(drawn.tolist()) for drawn in [*apart, together[0]]}) == 5  # local is nowhere global
    assert not draw(streams(0, cp=1), "global").equal(together[0])  # other positions


def test_no_two_replicas_stages_or_context_ranks_draw_the_same() -> None:
    places = [(dp, pp, cp, 0) for dp in range(2) for pp in range(2) for cp in range(2)]
    for name in ("global", "local"):
        drawn = {tuple(draw(RandomStreams(3, place), name).tolist()) for place in places}
        assert len(drawn) == len(places)


def test_streams_leave_torchs_own_alone() -> None:
    random, outside = streams(0), torch.get_rng_state()
    assert not draw(random, "global").equal(draw(random, "global"))
    assert torch.equal(torch.get_rng_state(), outside)


def test_a_replay_draws_the_same() -> None:
    random = streams(0)
    draw(random, "local")
    _, replay = random.replays()
    first, second = draw(random, "local"), draw(random, "local")
    with replay:
        assert draw(random, "local").equal(first)
    with random.preserved():
        third = draw(random, "local")
    assert draw(random, "local").equal(third)
    assert not third.equal(second)


class NoisyBlock(Block):
    """A block that draws by torch's own means, the same on every tensor rank; also when it is evaluated."""

    streams: RandomStreams

    def use_streams(self, streams: RandomStreams) -> None:
        self.streams = streams

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        out = super().forward(x, samples)
        with self.streams.fork("global"):
            return out * torch.rand_like(out)


class NoisyGPT(GPT):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(NoisyBlock(config, f"blocks.{layer}") for layer in range(config.num_layers))


def losses_with(case: Case, evaluating: bool = False) -> list[float]:
    mesh = Mesh(Layout(case.dp, case.tp, case.pp))
    plan = gpt_plan(case.config.model, case.sequence)
    engine = Engine(lambda: NoisyGPT(case.config.model), plan, mesh, case.config)
    losses = []
    for step in range(3):
        losses.append(engine.train_step(shard_of(case, step, mesh.dp.index), step).loss)
        if evaluating:
            engine.evaluate(shard_of(case, step, mesh.dp.index))
    return losses


def test_recomputation_and_evaluation_change_nothing(pool) -> None:
    case = Case(tp=2, batch=8, layers=2)
    expected = pool.run(2, losses_with, case)[0]
    recomputed = Case(tp=2, batch=8, layers=2, settings=(("train.recompute", "full"),))
    assert pool.run(2, losses_with, recomputed)[0] == expected
    assert pool.run(2, losses_with, case, True)[0] == expected


def train_noisily(config: Run, folder: Path, resume: bool = False) -> str:
    with patch.object(source, "make_model", NoisyGPT):
        return train_rank(config, folder, resume)


def test_a_resumed_run_draws_what_the_unbroken_one_draws(pool, small_run: Run, tmp_path: Path) -> None:
    shape = small_run.but(tp=2)
    pool.run(2, train_noisily, shape.but(steps=4), tmp_path / "unbroken")
    pool.run(2, train_noisily, shape.but(steps=2), tmp_path / "broken")
    printed = pool.run(2, train_noisily, shape.but(steps=4), tmp_path / "broken", True)[0]
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "unbroken")
    assert "random streams" not in printed


def drawn_after_restoring(config: Run, folder: Path) -> list[Tensor]:
    """The numbers of an engine that has loaded the newest checkpoint, and of one that has loaded none."""
    restored, fresh = (engine_of(config.config) for _ in range(2))
    checkpoint = newest(folder)
    assert checkpoint is not None
    restore_engine(restored, checkpoint)
    return [draw(engine.streams, "global") for engine in (restored, fresh)]


@pytest.mark.slow
def test_another_layout_draws_anew_and_says_so(pool, small_run: Run, tmp_path: Path) -> None:
    for folder in ("once", "twice"):
        pool.run(2, train_noisily, small_run.but(tp=2, steps=2), tmp_path / folder)
        printed = pool.run(1, train_noisily, small_run.but(steps=4), tmp_path / folder, True)[0]
        assert "The random streams that the model draws from belong to another layout" in printed
    assert losses_of(tmp_path / "once") == losses_of(tmp_path / "twice")
    pool.run(2, train_noisily, small_run.but(tp=2, steps=2), tmp_path / "saved")
    ((restored, fresh),) = pool.run(1, drawn_after_restoring, small_run, tmp_path / "saved")
    assert not restored.equal(fresh)  # which would draw the numbers of the first steps again


def test_runs_that_never_draw_store_no_streams(pool, small_run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, small_run.but(steps=1), tmp_path)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert not [name for name in stored_tensors(checkpoint.path) if name.startswith(STREAMS)]
