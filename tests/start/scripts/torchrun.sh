#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# samestep submit --profile gpu-node --nodes 2 --launcher torchrun --python python train.py --lr 0.1

export SRUN_CPUS_PER_TASK=32
export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=1 python -m torch.distributed.run --nnodes=2 --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$(scontrol show hostnames | head -n 1):$((10000 + SLURM_JOB_ID % 18999))" \
    train.py --lr 0.1
code=$?
exit "$code"
