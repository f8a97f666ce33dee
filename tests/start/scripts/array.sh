#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --array=0-3%2
#SBATCH --output=runs/%x_%A_%a.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile one-gpu --array 0-3%2 --python python --env 'NOTE=two words' sweep.py

# what `samestep runs` reads
export SAMESTEP_RUN=/home/me/runs/sweep_"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
mkdir -p -m 700 "$SAMESTEP_RUN" && rm -f "$SAMESTEP_RUN/result.json"
printf '{"argv": %s, "size": %d, "slurm_job": "%s", "host": "%s", "pid": %d, "started": %d}\n' \
    '["python", "sweep.py"]' 1 "$SLURM_JOB_ID" "$HOSTNAME" $$ "$(date +%s)" > "$SAMESTEP_RUN/run.json"
note_end() {
    echo "{\"exit_code\": $1, \"seconds\": $SECONDS}" > "$SAMESTEP_RUN/result.json"
    return "$1"
}
export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8
export NOTE='two words'

srun --kill-on-bad-exit=1 python sweep.py
code=$?
note_end "$code"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
