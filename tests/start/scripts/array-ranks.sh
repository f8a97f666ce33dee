#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --array=0-3
#SBATCH --output=runs/%x_%A_%a.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile gpu-node --array-ranks --python python train.py

export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=1 python -m samestep run --nproc-per-node=1 --nodes=4 \
    --node-rank="$SLURM_ARRAY_TASK_ID" --rendezvous=file:///home/me/runs/ranks-"$SLURM_ARRAY_JOB_ID" \
    train.py
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
