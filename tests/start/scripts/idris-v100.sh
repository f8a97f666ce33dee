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

# what `samestep runs` reads
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"
mkdir -p -m 700 "$SAMESTEP_RUN" && rm -f "$SAMESTEP_RUN/result.json"
printf '{"argv": %s, "size": %d, "slurm_job": "%s", "host": "%s", "pid": %d, "started": %d}\n' \
    '["python", "train.py", "--epochs", "3"]' 8 "$SLURM_JOB_ID" "$HOSTNAME" $$ "$(date +%s)" > "$SAMESTEP_RUN/run.json"
note_end() {
    echo "{\"exit_code\": $1, \"seconds\": $SECONDS}" > "$SAMESTEP_RUN/result.json"
    return "$1"
}
module purge || note_end $? || exit
module load pytorch/2 || note_end $? || exit
export SRUN_CPUS_PER_TASK=10
export OMP_NUM_THREADS=10

srun --kill-on-bad-exit=1 python train.py --epochs 3
code=$?
note_end "$code"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
