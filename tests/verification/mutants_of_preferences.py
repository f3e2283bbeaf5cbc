"""Faults in the loss of pairs of answers."""

from __future__ import annotations

from mutants import CP2, DP2, X2, Y2, Mutant

PAIRS = {"dpo": {"beta": 0.2}, "data": {"format": "preferences", "train": [{"path": "nowhere"}]}}

PREFERENCES = [
    Mutant(
        "the rejected answer is preferred",
        "parallel.preference_head",
        "chosen_P, rejected_P = rewards_B",
        "rejected_P, chosen_P = rewards_B",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "answers are pulled apart the more, the further apart they are",
        "parallel.preference_head",
        "torch.sigmoid(-margins_P)",
        "torch.sigmoid(margins_P)",
        grid=DP2,
        sections=PAIRS,
    ),
    Mutant(
        "the reference says nothing",
        "parallel.preference_head",
        "labels_BS) - reference_B)",
        "labels_BS) - 0 * reference_B)",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "an answer's log-probability lacks the tokens of other ranks of y",
        "parallel.preference_head",
        "for axis in (self.y, self.cp):",
        "for axis in (self.cp,):",
        grid=Y2,
        sections=PAIRS,
    ),
    Mutant(
        "an answer's log-probability lacks the tokens of other ranks of cp",
        "parallel.preference_head",
        "for axis in (self.y, self.cp):",
        "for axis in (self.y,):",
        grid=CP2,
        sections=PAIRS,
    ),
    Mutant(
        "every rank of cp counts the loss of a pair",
        "parallel.preference_head",
        ".sum() / head.cp.size",
        ".sum() / 1",
        grid=CP2,
        sections=PAIRS,
    ),
    Mutant(
        "tokens count for the other answers of their micro-batch",
        "parallel.preference_head",
        ".repeat_interleave(labels_BS.shape[1])",
        ".repeat(labels_BS.shape[1])",
        grid=X2,
        sections=PAIRS,
    ),
    Mutant(
        "the mean is over tokens, not over pairs",
        "training.job",
        "        if self.run.dpo.beta:\n            pairs = torch",
        "        if not self.run.dpo.beta:\n            pairs = torch",
        grid=DP2,
        sections=PAIRS,
    ),
]
