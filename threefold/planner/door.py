"""Contributions of the planner to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("cpu", "report", "resilience")
COMMANDS: Final = {
    "init": ("Train and use", "threefold.planner.commands.init:command"),
    "doctor": ("Check", "threefold.planner.commands.doctor:command"),
    "plan": ("Plan", "threefold.planner.commands.plan:command"),
    "show": ("Plan", "threefold.planner.commands.show:command"),
    "estimate": ("Plan", "threefold.planner.commands.estimate:command"),
    "simulate": ("Plan", "threefold.planner.commands.simulate:command"),
    "dry-run": ("Plan", "threefold.planner.commands.dry_run:command"),
    "config schema": ("", "threefold.planner.commands.config:schema"),
    "config reference": ("", "threefold.planner.commands.config:reference"),
    "config compatibility": ("", "threefold.planner.commands.config:compatibility"),
    "config size": ("", "threefold.planner.commands.config:size"),
    "config presets": ("", "threefold.planner.commands.config:presets"),
}
NAMES: Final = {
    "show": "threefold.planner.notebook:show",
    "simulate": "threefold.planner.notebook:simulate",
}
TYPES: Final = {
    "LayoutPage": "threefold.planner.notebook:LayoutPage",
    "SimulatedStep": "threefold.planner.notebook:SimulatedStep",
}
HOOKS: Final = {
    "custom_schedule": "threefold.planner.custom_schedule:custom_schedule",
    "peak_rate": "threefold.planner.hardware:peak_rate",
    "performance_meter": "threefold.planner.performance:PerformanceMeter",
    "profiler": "threefold.planner.profiling:StepProfiler",
    "fitting_micro_batch": "threefold.planner.fitting:fitting_micro_batch",
    "require_memory": "threefold.planner.fitting:require_memory",
}
