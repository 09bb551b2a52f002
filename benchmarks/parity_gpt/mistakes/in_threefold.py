"""The same mistakes in Threefold: entries of `tests/mutations/catalogue`, seen by a test each, most by `verify` too."""

from typing import Final

IN_THREEFOLD: Final = {
    "megatron-1685": "replicas-not-summed",
    "megatron-1923": "loss-by-data-ranks-alone",
    "megatron-599": "router-not-summed",
    "megatron-1652": "auxiliary-loss-divided-twice",
    "megatron-2789": "masters-not-published",
    "megatron-4070": "auxiliary-loss-by-micro-batch",
    "megatron-5798": "balance-by-own-tokens",
    "megatron-7452-11": "qk-norm-not-summed",
    "megatron-adfa873d": "mean-of-means-over-micro-batches",
    "deepspeed-8437": "muon-on-shards",
    "deepspeed-4321": "bucket-of-one-not-summed",
    "deepspeed-5170": "sum-into-a-copy",
    "deepspeed-5411": "replicated-counted-tp-times",
    "deepspeed-5555": "average-after-the-mean",
    "deepspeed-7839": "bf16-divided-by-a-scale",
    "deepspeed-7985": "summed-before-the-last-micro-batch",
    "deepspeed-8154": "gradient-scaled-at-each-stage",
    "pytorch-164777": "deferred-gradients-doubled",
    "torchtitan-1732": "divided-after-each-micro-batch",
    "torchtitan-1878": "experts-input-gradient-partial",
    "torchtitan-2206": "mean-of-means",
    "torchtitan-2416": "router-gradient-partial",
    "torchtitan-3174": "tied-gradient-doubled",
    "torchtitan-3206": "keys-gathered-along-heads",
    "torchtitan-3412": "chunked-head-gradient-not-summed",
    "torchtitan-4054": "experts-input-gradient-partial",
    "neox-1257": "sequence-norms-not-summed",
    "automodel-1408": "auxiliary-loss-dropped",
    "olmo-skipstep": "adam-counts-no-updates",
    "swift-10099": "samples-counted-by-every-rank",
    "transformers-34191": "gradient-of-micro-batches-summed",
}
"""By a row's key, the name of the entry. Rows without one are of features that Threefold lacks, or not put in yet."""
