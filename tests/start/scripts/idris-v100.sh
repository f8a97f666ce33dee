#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=10
#SBATCH --hint=nomultithread
#SBATCH --time=01:00:00
#SBATCH --account=abc@v100
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile idris-v100 --nodes 2 --account abc@v100 --module pytorch/2 train.py --epochs 3

module purge || exit
module load pytorch/2 || exit
export SRUN_CPUS_PER_TASK=10
export OMP_NUM_THREADS=10
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"

srun --kill-on-bad-exit=1 python train.py --epochs 3
code=$?
[ ! -d "$SAMESTEP_RUN" ] || echo "{\"exit_code\": $code}" > "$SAMESTEP_RUN/result.json"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
