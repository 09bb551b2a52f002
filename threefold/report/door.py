"""Contributions of reports to the core (`threefold.doors`)."""

from typing import Final

METRICS_FILE: Final = "metrics.jsonl"
CURVE_FILE: Final = "loss.png"
REPORT_FILE: Final = "report.html"
GOODPUT_FILE: Final = "goodput.json"
RUN_FILES: Final = {
    "metrics": METRICS_FILE,
    "loss_curve": CURVE_FILE,
    "report": REPORT_FILE,
    "goodput": GOODPUT_FILE,
}

COMMANDS: Final = {
    "watch": ("Train and use", "threefold.report.commands.watch:command"),
    "sweep": ("Train and use", "threefold.report.commands.sweep:command"),
    "report": ("Train and use", "threefold.report.commands.report:command"),
    "data show": ("", "threefold.report.commands.data:show"),
    "data verify": ("", "threefold.report.commands.data:verify"),
    "checkpoint": ("Files", "threefold.report.commands.checkpoint:app"),
}
FIRST_CALLBACKS: Final = {
    "goodput": "threefold.report.goodput:GoodputLedger",
    "live_line": "threefold.report.console:LiveLine",
    "metrics": "threefold.report.metrics:MetricsFile",
    "tensorboard": "threefold.report.tensorboard:TensorBoard",
}
CALLBACKS: Final = {
    "layers": "threefold.report.layers:LayerNorms",
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
    "whole_lines": "threefold.report.whole_lines:whole_lines",
    "token_facts": "threefold.report.commands.data:token_facts",
    "goodput": "threefold.report.goodput:goodput_of",
    "announce": "threefold.report.announcement:announce",
    "running_lines": "threefold.report.console:RunningLines",
    "import_writer": "threefold.report.tensorboard:import_writer",
}
