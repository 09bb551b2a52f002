"""Rules between preferences and other settings."""

from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.config.rules import Broken


def preference_rules(config: Config) -> Broken:
    """Yield settings that preferences exclude, or that have no effect without them."""
    preference, model = config.preference, config.model
    if not preference.beta:
        for name in preference.settings():
            if name != "beta" and getattr(preference, name) != type(preference).model_fields[name].default:
                yield (
                    f"preference.{name}",
                    "preference.beta is 0, so there is no loss of pairs; use beta 0.1 or leave it out",
                )
        return
    reason = f"preference.beta is {preference.beta:g}, "
    if preference.label_smoothing and preference.loss == "ipo":
        yield "preference.label_smoothing", f"{reason}and preference.loss ipo has no smoothing; use 0"
    if model.architecture == CUSTOM:
        yield "model.architecture", f"{reason}whose loss is computed by the head of a built-in model; use llama"
    elif model.mtp_layers:
        yield "model.mtp_layers", f"{reason}and pairs have no loss of further tokens; use 0"
    if config.data.loss_tokens != "answers":
        yield "data.loss_tokens", f"{reason}which compares answers alone; use answers"
