
echo "Loading common options"
GPUS=4
MBS=3
COMMON_OPTIONS="\
    --tensor-model-parallel-size $TP  \
    --${PRECISION:-bf16} \
    "
if [ ${LOWER:-false} == true ]; then
    COMMON_OPTIONS="${COMMON_OPTIONS} --no-gradient-accumulation-fusion"
else
    COMMON_OPTIONS="${COMMON_OPTIONS}"
fi
if [ ${GRAPH:-true} == true ]; then
    COMMON_OPTIONS="${COMMON_OPTIONS} --adam-beta2 ${BETA2:-0.95}"
fi
