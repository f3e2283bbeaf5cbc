"""Run lm-eval tasks during training, and write the scores by step to the run's tasks.jsonl."""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fourfold.config.run import RunConfig
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import UserError
from fourfold.evaluation.evaluate import prefix_token
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.model_folder import SMALL_FILES
from fourfold.inference.lm_eval_tasks import import_lm_eval, rehearse
from fourfold.memorization.scorers import GridScorer
from fourfold.memorization.scores import AttackSampling
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.training.job import Job
from fourfold.training.metrics import TASKS_FILE, add_record
from fourfold.training.validation_loss import is_last_step


class TasksInTraining:
    """A training callback that runs the lm-eval tasks in the section [evaluation] on the training grid. It runs them
    every ``evaluation.interval`` steps, and after the last step.

    Every process of the job must call ``after_step``. The first process writes the scores. If a run resumes from a
    step, the lines of later steps are replaced. If a task fails, training continues. The run prints a warning at once,
    and another one at the end.

    Raises:
        UserError: At the start of training: lm-eval or the tokenizer is missing, or lm-eval does not know or cannot run
            a task.
    """

    def __init__(self, run: RunConfig, job: Job, tokenizer: Tokenizer | None, run_dir: Path) -> None:
        self.run, self.job, self.config, self.path = run, job, run.evaluation, run_dir / TASKS_FILE
        import_lm_eval("evaluation.tasks needs")
        if tokenizer is None:
            raise UserError("evaluation.tasks needs a tokenizer; set data.tokenizer")
        self.folder = None if self.config.include_path is None else Path(self.config.include_path)
        with failing_together():
            rehearse(self.config.tasks, self.folder, self.config.num_fewshot)
        from fourfold.evaluation.harness import HarnessModel

        source = None if run.model.from_hf is None else local_folder(run.model.from_hf, SMALL_FILES)
        prefix = prefix_token(tokenizer, run.name, source)
        self.model = HarnessModel(GridScorer(job, AttackSampling()), tokenizer, prefix, run.training.seq_length)
        self.failed_after: list[int] = []

    def after_step(self, steps: int) -> None:
        """Run the tasks if they are due after this many steps."""
        config = self.config
        if steps % config.interval and not is_last_step(self.job.best, self.run, steps):
            return
        scores, failed = self.model.run_each(config.tasks, self.folder, config.limit, config.num_fewshot)
        record: dict[str, Any] = {"step": steps, "tasks": scores}
        if failed:
            record["failed"] = failed
            self.failed_after.append(steps)
        with failing_together():
            if dist.get_rank() == 0:
                add_record(self.path, record)
                for why in failed.values():
                    print(f"warning: after step {steps}, {why}", file=sys.stderr)

    def close(self) -> None:
        """Print a warning if tasks have failed during the run."""
        if self.failed_after and dist.get_rank() == 0:
            after = ", ".join(map(str, self.failed_after))
            print(
                f"warning: tasks failed after steps {after}; {self.path} lists the failed tasks and the reasons",
                file=sys.stderr,
            )
