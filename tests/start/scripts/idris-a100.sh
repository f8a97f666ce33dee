#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --hint=nomultithread
#SBATCH --time=01:00:00
#SBATCH --account=abc@a100
#SBATCH --constraint=a100
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile idris-a100 --account abc@a100 --module pytorch-gpu/py3 train.py

module purge || exit
module load arch/a100 pytorch-gpu/py3 || exit
export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"

srun --kill-on-bad-exit=1 python train.py
code=$?
[ ! -d "$SAMESTEP_RUN" ] || echo "{\"exit_code\": $code}" > "$SAMESTEP_RUN/result.json"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
