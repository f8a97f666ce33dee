#!/bin/bash
#SBATCH --job-name=fit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=5
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --exclusive
# samestep submit --profile cpu-node --setup '. ./venv/bin/activate' --option --exclusive --time 5 -m my.fit

. ./venv/bin/activate || exit
export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8
export SAMESTEP_RUN=/home/me/runs/fit_"$SLURM_JOB_ID"

srun --kill-on-bad-exit=1 python -m my.fit
code=$?
[ ! -d "$SAMESTEP_RUN" ] || echo "{\"exit_code\": $code}" > "$SAMESTEP_RUN/result.json"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
