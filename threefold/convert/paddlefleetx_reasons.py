"""Reasons for Fleet's settings without a counterpart, each with the patterns of its keys; the first match counts."""

from typing import Final

REASONS: Final = {
    "train.device auto uses the GPUs that it finds": "Global.device",
    "Fleet reads it under Engine": (
        "Global.logging_freq Global.max_steps Global.num_train_epochs Global.accumulate_steps Global.eval_freq "
        "Global.eval_iters Global.test_iters Global.run_mode Global.mix_precision.* Global.save_load.*"
    ),
    "these are environment variables of Paddle": "Global.flags.*",
    "train.max_steps ends the run; further epochs follow automatically": "Engine.num_train_epochs",
    "follows from the batch sizes": "Engine.accumulate_steps",
    "`threefold eval` evaluates the test part": "Engine.test_iters",
    "the folder of the run is an option of the command: threefold train … --run-dir": "Engine.save_load.output_dir",
    "threefold train … --resume resumes a run; Paddle's checkpoints are unsupported": "Engine.save_load.ckpt_dir",
    "a run resumes with its whole state": "Engine.save_load.load_meta_state",
    "checkpoints are made every checkpoint.every steps": "Engine.save_load.save_epoch",
    "the operations in 16 bits are fixed: products, but not norms, softmax and loss": "Engine.mix_precision.*",
    "kernels are chosen automatically": "Model.fused_* Optimizer.tensor_fusion Fused.*",
    "attention is always the fused one": "Model.use_flash_attn",
    "queries, keys and values are always one product": "Model.fuse_attn_qkv",
    "scores are scaled once; fused attention accumulates in fp32": "Model.scale_qk_*",
    "the vocabulary need not be divisible, so it is not padded": "Model.vocab_size_divisible_unit",
    "a GPT has no token types; Fleet does not use it either": "Model.type_vocab_size",
    "train.recompute_every leaves out blocks by a rhythm, not by a list": "Model.no_recompute_layers",
    "samples always come in an order drawn from train.seed": "Data.Train.sampler.shuffle",
    "samples of a step follow from train.seed and the step": "Data.*.sampler.*",
    "tokens are memory-mapped, so there are no workers": "Data.*.loader.*",
    "samples become batches, and labels follow from tokens": "Data.*.collate_fn Data.*.sample_split",
    "the files state their format": "Data.*.dataset.name",
    "the test part is that of data.split": "Data.Test.*",
    "validation reads data.path with data.split": "Data.Eval.*",
    "gradients are always summed in buckets": "Distributed.fuse_*",
    "process groups follow from the layout": "Distributed.hcg",
    "gradients are always accumulated in fp32, in place": "Distributed.use_main_grad *main_grad enable_addto",
    "parallel.zero_shards is sharding_degree, with or without it": "use_sharding",
    "weights and optimizer state stay on the device": "Distributed.sharding.sharding_offload",
    "communication is overlapped automatically": "Distributed.sharding.*_overlap",
    "train.recompute_every counts blocks": "Distributed.pp_recompute_interval",
    "each rank recomputes what it needs, on its device": "recompute_partition recompute_offload",
    "precision.master_weights is true by default": "Optimizer.multi_precision",
    "decay_steps counts steps with and without it": "Optimizer.lr.use_increments",
    "the step log has times; there is no profiler in a config": "Profiler.* profiler_options",
    "threefold generate has options of its own": "Generation.*",
    "threefold eval has options of its own": "Offline_Eval.* Eval.*",
    "there is no export for an inference engine": "Inference.* model_dir",
    "threefold plan searches for a layout": "Tuning.*",
}
"""Reasons for settings that need no counterpart."""
_EXPERTS: Final = "only architecture llama has experts, with settings of its own"
_CLASSES: Final = "there is no head for classification"
UNSUPPORTED: Final = {
    _EXPERTS: (
        "Model.moe_* Model.num_experts Model.expert_interval Model.topk *.balance_loss_weight "
        "Model.enable_expert_tensor_parallelism num_experts expert_mode gate balance_loss_weight"
    ),
    _CLASSES: "Model.num_classes Model.loss.* Model.metric.* Data.Train.dataset.root Data.Train.dataset.max_length",
    "Paddle's weights cannot be read; train.init_from takes a run, such as an imported Hugging Face model": (
        "Model.pretrained"
    ),
    "linear layers are neither pruned nor quantized in training": (
        "Compress.* Quantization.* Prune.* Model.use_skip_quant use_qat weight_bits activation_bits"
    ),
    "the schedules are cosine, linear, constant and wsd, from optimizer.lr to min_lr": (
        "Optimizer.lr.name Optimizer.lr.warmup Optimizer.lr.step_each_epoch Optimizer.lr.epochs "
        "Optimizer.lr.total_steps Optimizer.lr.run_mode"
    ),
    "gradients are clipped by their global norm": "Optimizer.grad_clip.name",
}
"""Reasons for settings that change the training and have no counterpart."""
MODULES: Final = {
    "GPTGenerationModule": "it generates text and trains nothing: its model and layout are converted",
    "GPTGenerationModuleAuto": "it generates text and trains nothing: its model and layout are converted",
    "GPTEvalModule": "it evaluates and trains nothing: its model and layout are converted",
    "GPTFinetuneModule": _CLASSES,
    "MoEModule": _EXPERTS,
}
"""Programs of Fleet other than the pre-training of a GPT, by the name of their module."""
SWITCHED_OFF: Final = {
    "use_qat": "weight_bits activation_bits",
    "Quantization.enable": "Quantization.*",
    "Prune.enable": "Prune.*",
    "Compress.Quantization.enable": "Compress.Quantization.*",
    "Compress.Prune.enable": "Compress.Prune.*",
    "Tuning.enable": "Tuning.*",
}
"""Switch → patterns of the settings that nothing reads while it is false."""
