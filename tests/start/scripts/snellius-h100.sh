#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --partition=gpu_h100
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile snellius-h100 --module 2024 --setup '. ./venv/bin/activate' train.py

module purge || exit
module load 2024 || exit
. ./venv/bin/activate || exit
export SRUN_CPUS_PER_TASK=16
export OMP_NUM_THREADS=16
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"

srun --kill-on-bad-exit=1 python train.py
code=$?
[ ! -d "$SAMESTEP_RUN" ] || echo "{\"exit_code\": $code}" > "$SAMESTEP_RUN/result.json"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
