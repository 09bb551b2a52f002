"""The peak memory of each pipeline stage by cause, without torch: `stages.stage_memory` is the door."""
