"""Learning-rate schedules, one file each: what follows the warm-up. `config.optimizer.LR_SCHEDULES` has a row for
every one of them."""
