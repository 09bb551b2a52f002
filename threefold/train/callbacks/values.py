"""The values that a step and an evaluation report, by the names that files and trackers have for them."""

from threefold.train.callbacks.base import EvaluationRecord, StepRecord


def step_values(record: StepRecord) -> dict[str, float]:
    """`loss`, `grad_norm`, `lr`, `tokens_per_second`, `epoch`, and `loss_scale` where there is one."""
    values: dict[str, float] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens_per_second": record.tokens_per_second,
        "epoch": record.epoch,
    }
    return values if record.loss_scale is None else {**values, "loss_scale": record.loss_scale}


def evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    """`valid_loss`, and for a mixture `valid_loss/NAME` of each corpus."""
    return {"valid_loss": record.loss, **{f"valid_loss/{name}": loss for name, loss in record.corpus_losses.items()}}
