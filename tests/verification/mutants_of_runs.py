"""List faults outside of the training step: in the data path, resuming, validation, metrics, and audits."""

from __future__ import annotations

from mutants import AVERAGE, CP2, DP2, HASH, PACKED, X2, Y2, Mutant
from mutants_of_preferences import PAIRS
from tiny_runs import GEMMA2, LLAMA, MIXTURE

ANSWERS = {"data": {"format": "sft", "train": [{"path": "nowhere"}], "mask_documents": True}}
EP2 = {"dp": 2, "ep": 2}
FP16 = {"training": {"precision": "fp16"}}

DATA_PATH = [
    Mutant(
        "the mask of answers is one token early",
        "data.masks:answers_only",
        "windows.answers[:, 1:]",
        "windows.answers[:, :-1]",
        grid=DP2,
    ),
    Mutant(
        "a conversation uses the answer mask of the conversation before it",
        "data.conversations:ConversationCorpus._filled",
        "self.answers.read(start, length)",
        "self.answers.read(max(0, start - length), length)",
        grid=DP2,
        sections=ANSWERS,
    ),
    Mutant(
        "the rejected answer uses the answer mask of the chosen one",
        "data.conversations:ConversationCorpus._filled",
        "self.answers.read(start, length)",
        "self.answers.read(int(self._offsets[conversation // 2 * 2]), length)",
        grid=DP2,
        sections=PAIRS,
    ),
    Mutant(
        "document boundaries are one token late",
        "data.dataset:TokenWindows.read",
        "absent + self.corpus.document_starts(start + absent, length - absent)",
        "absent + 1 + self.corpus.document_starts(start + absent, length - absent - 1)",
        grid=X2,
    ),
    Mutant(
        "a document of one token becomes part of the document before it",
        "data.loader:document_ends",
        "is_last[:, :-1] = documents[:, 1:] != documents[:, :-1]",
        "is_last[:, :-1] = documents[:, 1:] != documents[:, :-1]\nis_last[:, 1:-1] &= ~is_last[:, :-2]",
        grid=X2,
        sections=PACKED,
    ),
    Mutant(
        "all tokens after the first padding count as padding",
        "data.loader:Loader.assemble",
        "np.ascontiguousarray(windows.is_data[:, :-1])",
        "np.logical_and.accumulate(windows.is_data[:, :-1], axis=1)",
        MIXTURE,
        EP2,
        PACKED,
        against="plain",
    ),
    Mutant(
        "the longer answer of a pair is cut to the length of the shorter one",
        "training.job:Job.forward",
        "micro_batch.labels",
        "micro_batch.labels.masked_fill((micro_batch.labels < 0).view(-1, 2, micro_batch.labels.shape[1]).any(1)"
        ".repeat_interleave(2, 0), IGNORE_INDEX)",
        grid=DP2,
        sections=PAIRS,
    ),
]

TRAINER = [
    Mutant(
        "a resumed run reads its data from the beginning",
        "training.trainer:Trainer.train_step",
        "self.corpora.train.step(step)",
        "self.corpora.train.step(step % 2)",
        grid=DP2,
    ),
    Mutant(
        "a resumed run skips a batch",
        "training.trainer:Trainer.train_step",
        "self.corpora.train.step(step)",
        "self.corpora.train.step(step + step // 2)",
        grid=DP2,
    ),
    Mutant(
        "if a step overflows, the next step reads the same batch again",
        "training.trainer:Trainer.train_step",
        "self.steps = step + 1",
        "self.steps = step + is_updated",
        grid=DP2,
        sections=FP16,
    ),
    Mutant(
        "if a step overflows, the next batch is skipped",
        "training.trainer:Trainer.train_step",
        "self.steps = step + 1",
        "self.steps = step + 2 - is_updated",
        grid=DP2,
        sections=FP16,
    ),
    Mutant(
        "the reference model's log-probabilities are assigned to the wrong answers",
        "training.reference_model:reference_log_probabilities",
        "torch.cat(outputs).double()",
        "torch.cat(outputs).double().flip(0)",
        grid=DP2,
        sections=PAIRS,
    ),
    Mutant(
        "after resuming, DPO uses the run's trained weights as the reference model",
        "training.reference_model:install_reference",
        "checkpoint is None",
        "True",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "DPO's recorded margin covers only one rank",
        "training.job:Job.take_preferences",
        "(self.grid.batch, self.grid.pp)",
        "(self.grid.pp,)",
        grid=DP2,
        sections=PAIRS,
    ),
    Mutant(
        "the rejected answer's reward is recorded as the chosen answer's reward",
        "parallel.tensor.preference_head:_PreferenceLoss.forward",
        "head.note(margins_P, chosen_P)",
        "head.note(margins_P, rejected_P)",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "the validation loss is a mean over micro-batches",
        "training.validation_loss:validate",
        'found = {"validation_loss": job.evaluate(mine).item()}',
        'found = {"validation_loss": sum(job.evaluate([each]).item() for each in mine) / len(mine)}',
        grid=DP2,
    ),
    Mutant(
        "each validation uses different data",
        "training.validation_loss:validate",
        "corpora.validation.step(step)",
        "corpora.validation.step(step + job.optimizer.steps_taken() - 1)",
        grid=X2,
    ),
    Mutant(
        "the goldfish mask applies to validation",
        "training.corpora:open_corpora",
        "make_loader(run, unseen, batch, masks, prefetch=False)",
        "make_loader(run, unseen, batch, masks if goldfish is None else [*masks, goldfish], prefetch=False)",
        grid=X2,
        sections=HASH,
    ),
    Mutant(
        "validation of the averages uses the weights instead",
        "training.weight_average:WeightAverage.in_place_of_weights",
        "shard.local.copy_(average)",
        "shard.local.copy_(shard.local)",
        grid=X2,
        sections=AVERAGE,
    ),
    Mutant(
        "after validation, training continues with the averaged weights",
        "training.weight_average:WeightAverage.in_place_of_weights",
        "shard.local.copy_(weight)",
        "shard.local.copy_(shard.local)",
        grid=X2,
        sections=AVERAGE,
    ),
    Mutant(
        "the recorded learning rate is the learning rate of the next step",
        "training.run_record:RunRecord.step",
        "self.job.learning_rate(step)",
        "self.job.learning_rate(step + 1)",
        grid=X2,
    ),
    Mutant(
        "the recorded share of trained tokens covers only one rank",
        "training.step_checks:figures_of_all_ranks",
        "result.kept_tokens",
        "result.kept_tokens / 2",
        grid=DP2,
    ),
]

BF16_WEIGHTS = {"training": {"precision": "bf16", "master_weights": "bf16"}}

STEP = [
    Mutant(
        "the loss is a mean over micro-batches, not over the tokens of a step",
        "training.job:Job.forward_backward",
        "loss * scale",
        "loss * factor / (micro_batch.labels >= 0).sum().clamp(min=1) / len(micro_batches)",
    ),
    Mutant(
        "fp16 gradients overflow inside a matmul, although its result is small",
        "parallel.tensor.matmuls:Matmuls.input_gradient",
        "return grad @ weight",
        "return (grad * 65536) @ weight / 65536",
        grid=DP2,
        sections=FP16,
    ),
    Mutant(
        "a step that overflows changes Muon's momentum",
        "training.job:Job.update",
        "return self.skip_update()",
        "self.optimizer.step(0.0)\nreturn self.skip_update()",
        grid=DP2,
        sections=FP16 | {"optimizer": {"name": "muon"}},
    ),
    Mutant(
        "gradients are clipped before the loss scale is removed",
        "training.job:Job.clip",
        "self.clip_gradients(self.run.optimizer.max_grad_norm, scale)",
        "self.clip_gradients(self.run.optimizer.max_grad_norm, 1.0) / scale",
        grid=DP2,
        sections=FP16,
    ),
    Mutant(
        "the validation loss covers only one rank",
        "training.job:Job.evaluate",
        "self.mean_loss(self.outputs(micro_batches), kept)",
        "torch.stack([total / 64 for total in self.outputs(micro_batches)]).mean()",
        grid=DP2,
    ),
    Mutant(
        "stochastic rounding draws different numbers on every replica",
        "training.optimizer:ShardedOptimizer._round",
        "self._steps",
        "self._steps + torch.distributed.get_rank()",
        grid=DP2,
        sections=BF16_WEIGHTS | {"optimizer": {"stochastic_rounding": True}},
    ),
]

AUDIT = [
    Mutant(
        "the audit does not cap the logits",
        "memorization.scorers:_scored",
        "logits_mV = softcapped(logits_mV, head.softcap)",
        "pass",
        GEMMA2,
        DP2,
    ),
    Mutant(
        "the audit includes the padding of the vocabulary",
        "memorization.scorers:_scored",
        "all_gather(logits_mv, head.x, 1, 'audit: logits')[:, : head.vocab_size]",
        "all_gather(logits_mv, head.x, 1, 'audit: logits')",
        LLAMA | {"vocab_size": 301},
        X2,
    ),
    Mutant(
        "the audit joins tokens in the order of the cp ranks, not of the sequence",
        "memorization.scorers:GridScorer._in_order",
        "order_S.argsort()",
        "order_S.argsort().sort().values",
        grid=CP2,
    ),
    Mutant(
        "the audit pads documents on the left",
        "memorization.scorers:_padded",
        "tokens[0, row, : len(document) - 1] = document[:-1]",
        "tokens[0, row, width - len(document) + 1 :] = document[:-1]",
        grid=DP2,
    ),
    Mutant(
        "the audit returns scores in the order of document lengths",
        "memorization.scorers:GridScorer._gather",
        "[found[number] for number in range(count)]",
        "list(found.values())",
        grid=DP2,
    ),
    Mutant(
        "the audit takes its targets from another y rank",
        "memorization.scorers:_scored",
        "targets_N[chunk].chunk(head.y.size)[head.y.rank]",
        "targets_N[chunk].chunk(head.y.size)[head.y.rank - 1]",
        grid=Y2,
    ),
    Mutant(
        "the audit rounds the softmax normalizer to 16 bits",
        "memorization.scores:score_logits",
        "normalizer_m = total_m.log()",
        "normalizer_m = total_m.bfloat16().log().float()",
        grid=DP2,
    ),
    Mutant(
        "the audit records the target's log-probability as the mean log-probability",
        "memorization.scores:score_logits",
        "mean_m - normalizer_m",
        "log_prob_m",
        grid=DP2,
    ),
    Mutant(
        "the audit computes the variance without subtracting the mean",
        "memorization.scores:score_logits",
        "logits_mV.sub_(mean_m[:, None])",
        "logits_mV",
        grid=DP2,
    ),
    Mutant(
        "the audit's sampling ignores the temperature",
        "memorization.scores:score_logits",
        "logits_mV / sampling.temperature",
        "logits_mV",
        grid=DP2,
    ),
    Mutant(
        "the audit predicts the wrong token: the id of the most likely token plus 1",
        "memorization.scores:score_logits",
        "predicted_m.float()",
        "(predicted_m + 1).float() % logits_mV.shape[1]",
        grid=DP2,
    ),
]

RUNS = [*DATA_PATH, *TRAINER, *STEP, *AUDIT]
