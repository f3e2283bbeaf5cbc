#!/bin/bash
# Written by `fourfold launch slurm` for the site @SITE@. Submit it with: sbatch FILE
@SBATCH@
# signal:    so long before the end of the wall time SLURM sends SIGUSR1 to the processes (not to this script);
#            they save a checkpoint after their step and leave with exit code 3
# requeue:   the job may start again, under the same id
# open-mode: the output of earlier starts stays

@SETUP@
# srun gives the highest exit code. A process that ends does not take the others with it at once (they may be saving,
# or writing the report), but after so many seconds (wait).
srun @SRUN@ \
    @COMMAND@
code=$?

# Starts since the last one that ended in a save: those after a crash are limited.
restarts=${SLURM_RESTART_COUNT:-0}
last_save=$SLURM_JOB_NAME-$SLURM_JOB_ID.restarts
crashes=$((restarts - $(cat "$last_save" 2> /dev/null || echo 0)))

case $code in
    0) # done
        rm -f "$last_save"
        exit 0
        ;;
    3) # stopped by a signal, after saving
        echo $((restarts + 1)) > "$last_save"
        ;;
    2 | 126 | 127 | 130) # a mistake that the message above names, a command that is not there, Ctrl-C
        echo "exit code $code: not started again" >&2
        exit "$code"
        ;;
    *) # a crash: training goes on from the newest checkpoint
        if ((crashes >= @MAX_CRASHES@)); then
            echo "exit code $code, after $crashes restarts in a row without a save by a signal: not started again" >&2
            exit "$code"
        fi
        ;;
esac

# scancel ends this script too, so that a job that was cancelled does not come here.
echo "exit code $code: started again, as restart $((restarts + 1))" >&2
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
