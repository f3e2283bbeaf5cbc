#!/bin/bash
# Written by `fourfold launch torchrun`. @USE@
@SETUP@
set -euo pipefail # not before: modules may use variables that are not set
export PYTHONUNBUFFERED=1 # lines of the log appear at once
# After SIGTERM or Ctrl-C the processes have so many seconds to finish the step and to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@SAVE_SECONDS@

exec torchrun @OPTIONS@ \
    --no-python @COMMAND@
