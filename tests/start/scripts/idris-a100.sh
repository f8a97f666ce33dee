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

# what `samestep runs` reads
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"
mkdir -p -m 700 "$SAMESTEP_RUN" && rm -f "$SAMESTEP_RUN/result.json"
printf '{"argv": %s, "size": %d, "slurm_job": "%s", "host": "%s", "pid": %d, "started": %d}\n' \
    '["python", "train.py"]' 8 "$SLURM_JOB_ID" "$HOSTNAME" $$ "$(date +%s)" > "$SAMESTEP_RUN/run.json"
note_end() {
    echo "{\"exit_code\": $1, \"seconds\": $SECONDS}" > "$SAMESTEP_RUN/result.json"
    return "$1"
}
module purge || note_end $? || exit
module load arch/a100 pytorch-gpu/py3 || note_end $? || exit
export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=1 python train.py
code=$?
note_end "$code"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
