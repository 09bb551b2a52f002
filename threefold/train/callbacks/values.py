"""The values that a step and an evaluation report, by the names that files and trackers have for them."""

from threefold.train.callbacks.base import EvaluationRecord, StepRecord


def step_values(record: StepRecord) -> dict[str, float]:
    """`loss`, `grad_norm`, `lr`, `tokens_per_second`, `epoch`, and `loss_scale` where there is one; `term/NAME` of each
    term of a loss of several; and `hardware_values`. Of a step whose samples were not read `lr` and `epoch` alone."""
    if not record.is_read:
        return {"lr": record.lr, "epoch": record.epoch}
    values: dict[str, float] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens_per_second": record.tokens_per_second,
        "epoch": record.epoch,
    }
    if record.loss_scale is not None:
        values["loss_scale"] = record.loss_scale
    values |= hardware_values(record)
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}


def hardware_values(record: StepRecord) -> dict[str, float]:
    """`seconds/PHASE`, `tflops` and `mfu` where they are known, `memory` and `largest_memory`."""
    values = {f"seconds/{phase}": seconds for phase, seconds in record.phases.items()}
    used = record.performance
    if used is None:
        return values
    if used.flops_per_second is not None:
        values["tflops"] = used.flops_per_second / 1e12
    if used.mfu is not None:
        values["mfu"] = used.mfu
    return values | {"memory": used.memory, "largest_memory": used.largest_memory}


def evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    """`valid_loss`, for a mixture `valid_loss/NAME` of each corpus, and `valid_term/NAME` of each term of a loss of
    several."""
    values = {"valid_loss": record.loss}
    values |= {f"valid_loss/{name}": loss for name, loss in record.corpus_losses.items()}
    return values | {f"valid_term/{name}": mean for name, mean in record.terms.items()}
