"""A canary for each private part of `torch.distributed.pipelining`: what torch has changed, in a sentence."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import B, F

from threefold.torch_private import pipelining
from threefold.torch_private.pipelining import (
    AnyOrderRuntime,
    BufferedPipelineStage,
    PipelineAction,
    PipelineSchedule,
    PipelineScheduleRuntime,
    RecvInfo,
    Schedule1F1BOfAnyCount,
    add_send_recv,
    lone_schedule,
    planned_actions,
)


def stage(index: int, stages: int = 2) -> Any:
    """All that the constructor of a schedule asks of a stage."""
    return SimpleNamespace(
        num_stages=stages,
        group_size=stages,
        group_rank=index,
        submod=None,
        stage_index=index,
        is_first=index == 0,
        is_last=index == stages - 1,
    )


def loss(output: float, target: float) -> float:
    return output + target


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, PipelineScheduleRuntime])
def test_pipeline_schedule(kind: type) -> None:
    assert issubclass(kind, PipelineSchedule), f"torch's {kind.__name__} is no _PipelineSchedule any more"
    for name in ("step", "eval"):
        assert callable(getattr(PipelineSchedule, name, None)), f"torch's _PipelineSchedule has no {name} any more"


def test_pipeline_schedule_runtime() -> None:
    schedule = ScheduleInterleaved1F1B([stage(0)], 2, loss_fn=loss, scale_grads=False)
    assert isinstance(schedule, PipelineScheduleRuntime), "torch's interleaved schedule runs by another class"
    order = getattr(schedule, "pipeline_order_with_comms", None)
    assert order, "torch's schedules keep their actions elsewhere than in pipeline_order_with_comms"
    assert set(order) == {0, 1}, "torch's pipeline_order_with_comms is no longer a mapping from ranks to actions"
    assert schedule.stage_index_to_group_rank == {0: 0, 1: 1}, "torch's stage_index_to_group_rank maps differently"
    assert "pipeline_order_with_comms" in inspect.getsource(PipelineScheduleRuntime._step_microbatches), (
        "torch's runtime takes its actions from elsewhere than pipeline_order_with_comms"
    )


def test_pipeline_action() -> None:
    assert PipelineAction._fields == ("stage_index", "computation_type", "microbatch_index", "sub_actions"), (
        "torch's _Action has other fields"
    )
    assert PipelineAction.from_str("1F2") == PipelineAction(1, F, 2), "torch writes its actions in another way"
    assert PipelineAction(1, B, 2).is_compute_op, "torch's _Action does not say any more whether it computes"


def test_add_send_recv() -> None:
    orders = {rank: [PipelineAction(rank, F, 0), PipelineAction(rank, B, 0)] for rank in range(2)}
    order = add_send_recv(orders, {0: 0, 1: 1}.__getitem__, 2)
    written = {rank: [str(action) for action in actions] for rank, actions in order.items()}
    assert written == {0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0"], 1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]}, (
        "torch's _add_send_recv puts sends and receives elsewhere"
    )


def test_recv_info() -> None:
    parameters = inspect.signature(RecvInfo).parameters
    assert {"buffer", "is_root_arg"} <= parameters.keys(), "torch's _RecvInfo has no buffer or is_root_arg any more"


@pytest.mark.parametrize(
    ("hook", "buffers"),
    [("_setup_forward_recv_info", "args_recv_info"), ("_setup_backward_recv_info", "grad_recv_info")],
)
def test_buffered_pipeline_stage(hook: str, buffers: str) -> None:
    assert hasattr(PipelineStage, hook), f"torch's PipelineStage has no {hook} any more, so buffers are made elsewhere"
    assert f"self.{buffers}[" in inspect.getsource(getattr(PipelineStage, hook)), (
        f"torch's {hook} puts the receive buffers elsewhere than in {buffers}"
    )
    assert f"self.{hook}(" in inspect.getsource(inspect.getmodule(PipelineStage)), f"torch calls {hook} no more"  # type: ignore[arg-type]


def test_a_buffered_stage_tells_what_is_on_its_rank() -> None:
    own = SimpleNamespace(stage_index_to_group_rank={0: 0, 1: 1}, group_rank=1)
    own._is_same_rank = lambda number: PipelineStage._is_same_rank(own, number)  # type: ignore[arg-type]
    found = [BufferedPipelineStage.is_on_this_rank(own, number) for number in (0, 1)]  # type: ignore[arg-type]
    assert found == [False, True], "torch's PipelineStage tells in another way which stages are on its rank"


def test_schedule_1f1b_of_any_count() -> None:
    with pytest.raises(ValueError, match="must be greater than"):
        Schedule1F1B(stage(0), 1, loss_fn=loss)  # else torch takes fewer micro-batches than stages: drop our class
    few = Schedule1F1BOfAnyCount(stage(0), 1, loss_fn=loss)
    assert few._n_microbatches == 1, "torch's single-stage schedules keep their number of micro-batches elsewhere"


def test_any_order_runtime() -> None:
    own, torchs = (
        kind([stage(0, 1)], 2, loss_fn=loss, scale_grads=False) for kind in (AnyOrderRuntime, PipelineScheduleRuntime)
    )
    for schedule in (own, torchs):
        for number in (1, 0):
            schedule._maybe_compute_loss(stage(0, 1), 10.0 * number, [0.5, 0.25], number)
    assert torchs._maybe_get_loss(stage(0, 1), 0) == 10.25, "torch finds losses by their micro-batch: drop our class"
    assert own._maybe_get_loss(stage(0, 1), 0) == 0.5, "torch keeps the losses of micro-batches elsewhere"
    losses: list[float] = []
    own._update_losses([stage(0, 1)], losses)
    assert losses == [0.5, 10.25], "torch hands the losses of micro-batches over in another way"


@pytest.mark.parametrize(
    ("kind", "order"),
    [(Schedule1F1B, "0F0 0F1 0B0 0F2 0B1 0B2"), (ScheduleGPipe, "0F0 0F1 0F2 0B0 0B1 0B2")],
)
def test_planned_actions(kind: Any, order: str) -> None:
    schedule = kind(stage(0), 3, loss_fn=loss)
    for name in ("_stage", "_n_microbatches", "_num_stages"):
        assert hasattr(schedule, name), f"torch's single-stage schedules have no {name} any more"
    assert " ".join(map(str, planned_actions(schedule))) == order, f"torch writes actions of {kind.__name__} otherwise"


def test_lone_schedule() -> None:
    lone = lone_schedule(ScheduleInterleaved1F1B, [0, 1, 0, 1], 2)
    stages = [SimpleNamespace(**vars(stage(number, 4)) | {"group_rank": 0, "group_size": 2}) for number in (0, 2)]
    with_sends = ScheduleInterleaved1F1B(stages, 2, loss_fn=loss, scale_grads=False)
    assert [action.is_compute_op for action in lone.pipeline_order_with_comms[0]] == [True] * 8, (
        "torch's schedules put sends among their actions elsewhere than in _prepare_schedule_with_comms"
    )
    assert planned_actions(lone, 0) == planned_actions(with_sends), "without sends torch's schedules have other actions"
    assert {action.stage_index for action in planned_actions(lone, 1)} == {1, 3}, "torch's schedules lack other ranks"


def test_every_part_has_a_canary() -> None:
    own = pipelining.__name__
    parts = {name for name, value in vars(pipelining).items() if getattr(value, "__module__", "") == own}
    text = inspect.getsource(inspect.getmodule(stage))  # type: ignore[arg-type]
    assert {name for name in parts if name not in text} == set()
