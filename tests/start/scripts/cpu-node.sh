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

# what `samestep runs` reads
export SAMESTEP_RUN=/home/me/runs/fit_"$SLURM_JOB_ID"
mkdir -p -m 700 "$SAMESTEP_RUN" && rm -f "$SAMESTEP_RUN/result.json"
printf '{"argv": %s, "size": %d, "slurm_job": "%s", "host": "%s", "pid": %d, "started": %d}\n' \
    '["python", "-m", "my.fit"]' 4 "$SLURM_JOB_ID" "$HOSTNAME" $$ "$(date +%s)" > "$SAMESTEP_RUN/run.json"
note_end() {
    echo "{\"exit_code\": $1, \"seconds\": $SECONDS}" > "$SAMESTEP_RUN/result.json"
    return "$1"
}
. ./venv/bin/activate || note_end $? || exit
export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=1 python -m my.fit
code=$?
note_end "$code"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
