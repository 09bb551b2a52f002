#!/bin/bash
TP=${TP:-1}
FSDP=${FSDP:-1}
PROFILE=${PROFILE:-0}
ARGS=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --tensor-model-parallel-size ${TP}
    --micro-batch-size 1 --global-batch-size 32 --lr 1e-4
)
if [ "${FSDP}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    ARGS=(
        "${ARGS[@]}"
        --use-megatron-fsdp
        --init-model-with-meta-device
    )
fi
if [ "${PROFILE}" = 1 ]; then
    ARGS=("${ARGS[@]}" --profile --profile-step-end 12)
fi
TRAINING_CMD="
cd /somewhere;
python /somewhere/pretrain_gpt.py ${ARGS[@]}"
LOGS=logs
mkdir -p ${LOGS} || {
    echo "Error"
    exit 1
}
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
srun \
    --mpi=pmix -l \
    bash -x -c "${TRAINING_CMD}" 2>&1 | tee ${LOGS}/\${SLURM_JOB_ID}.log

EOF
