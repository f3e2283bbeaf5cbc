"""Faults in the loss of pairs of answers."""

from __future__ import annotations

from mutants import CP2, DP2, X2, Y2, Mutant

PAIRS = {"dpo": {"beta": 0.2}, "data": {"format": "preferences", "train": [{"path": "nowhere"}]}}

PREFERENCES = [
    Mutant(
        "DPO prefers the rejected answer",
        "parallel.tensor.preference_head:_PreferenceLoss.forward",
        "chosen_P, rejected_P = rewards_B.unflatten(0, (-1, 2)).unbind(1)",
        "rejected_P, chosen_P = rewards_B.unflatten(0, (-1, 2)).unbind(1)",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "DPO's gradient grows with the margin instead of shrinking",
        "parallel.tensor.preference_head:_PreferenceLoss.forward",
        "torch.sigmoid(-margins_P)",
        "torch.sigmoid(margins_P)",
        grid=DP2,
        sections=PAIRS,
    ),
    Mutant(
        "DPO ignores the reference model",
        "parallel.tensor.preference_head:_PreferenceLoss.forward",
        "head.log_probabilities(x_BSh, weight, labels_BS) - reference_B",
        "head.log_probabilities(x_BSh, weight, labels_BS) - 0 * reference_B",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "an answer's log-probability leaves out the tokens of other y ranks",
        "parallel.tensor.preference_head:PreferenceHead.log_probabilities",
        "(self.y, self.cp)",
        "(self.cp,)",
        grid=Y2,
        sections=PAIRS,
    ),
    Mutant(
        "an answer's log-probability leaves out the tokens of other cp ranks",
        "parallel.tensor.preference_head:PreferenceHead.log_probabilities",
        "(self.y, self.cp)",
        "(self.y,)",
        grid=CP2,
        sections=PAIRS,
    ),
    Mutant(
        "every cp rank counts the full loss of a pair",
        "parallel.tensor.preference_head:_PreferenceLoss.forward",
        "-F.logsigmoid(margins_P).sum() / head.cp.size",
        "-F.logsigmoid(margins_P).sum() / 1",
        grid=CP2,
        sections=PAIRS,
    ),
    Mutant(
        "log-probabilities of tokens are added to the wrong answers",
        "parallel.tensor.preference_head:PreferenceHead.log_probabilities",
        "torch.arange(len(labels_BS), device=x_BSh.device).repeat_interleave",
        "torch.arange(len(labels_BS), device=x_BSh.device).repeat",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "DPO's recorded accuracy counts the pairs whose rejected answer wins",
        "parallel.tensor.preference_head:PreferenceHead.note",
        "margins_P > 0",
        "margins_P < 0",
        grid=DP2,
        sections=PAIRS,
    ),
    Mutant(
        "DPO's loss is a mean over tokens, not over pairs",
        "training.job:Job.count_kept",
        "self.run.dpo.beta",
        "not self.run.dpo.beta",
        grid=DP2,
        sections=PAIRS,
    ),
]
