"""Contributions of reports to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {
    "watch": ("Train and use", "threefold.report.commands.watch:command"),
    "report": ("Train and use", "threefold.report.commands.report:command"),
    "data show": ("", "threefold.report.commands.data:show"),
    "data verify": ("", "threefold.report.commands.data:verify"),
    "checkpoint": ("Files", "threefold.report.commands.checkpoint:app"),
}
FIRST_CALLBACKS: Final = {
    "goodput": "threefold.report.goodput:GoodputLedger",
    "live_line": "threefold.report.console:LiveLine",
}
CALLBACKS: Final = {
    "loss_curve": "threefold.report.loss_curve:LossCurve",
    "report": "threefold.report.document:RunReport",
    "summary": "threefold.report.console:Summary",
}
CHOSEN_CALLBACKS: Final = {
    "early_stopping": "threefold.report.callbacks:EarlyStopping",
    "csv_log": "threefold.report.callbacks:CSVLog",
    "epoch_metrics": "threefold.report.callbacks:EpochMetrics",
    "phase_timers": "threefold.report.callbacks:PhaseTimers",
    "wandb": "threefold.report.callbacks:WeightsAndBiases",
    "mlflow": "threefold.report.callbacks:MLflowRun",
}
HOOKS: Final = {
    "token_facts": "threefold.report.commands.data:token_facts",
    "goodput": "threefold.report.goodput:Goodput",
}
