#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=24
#SBATCH --hint=nomultithread
#SBATCH --time=01:00:00
#SBATCH --account=abc@h100
#SBATCH --constraint=h100
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile idris-h100 --account abc@h100 --python /py train.py

module purge || exit
module load arch/h100 || exit
export SRUN_CPUS_PER_TASK=24
export OMP_NUM_THREADS=24
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"

srun --kill-on-bad-exit=1 /py train.py
code=$?
[ ! -d "$SAMESTEP_RUN" ] || echo "{\"exit_code\": $code}" > "$SAMESTEP_RUN/result.json"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
