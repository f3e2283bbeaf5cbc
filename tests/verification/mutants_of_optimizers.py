"""Faults in Muon and Lion, and in the way in which Muon's matrices are put together."""

from __future__ import annotations

from mutants import DP2, GROUPS, LORA, X2, X2Y2, Z2, Mutant
from tiny_runs import GPT, LLAMA, MIXTURE

MUON, LION = ({"optimizer": {"name": name}} for name in ("muon", "lion"))
MUON_GROUPS = {"optimizer": MUON["optimizer"] | GROUPS["optimizer"]}

OPTIMIZERS = [
    Mutant(
        "halves of a matrix are orthogonalized alone",
        "training.owned_matrices",
        "whole_BMN = function(whole_BMN)",
        "whole_BMN = function(whole_BMN.unflatten(1, (2, -1)).flatten(0, 1)).reshape(whole_BMN.shape)",
        grid=X2,
        sections=MUON,
    ),
    Mutant(
        "the matrices of an owner are orthogonalized as one",
        "training.owned_matrices",
        "whole_BMN = function(whole_BMN)",
        "whole_BMN = function(whole_BMN.flatten(0, 1)[None])[0].reshape(whole_BMN.shape)",
        sections=MUON,
    ),
    Mutant(
        "experts change places on the way back",
        "training.owned_matrices",
        "results = _flat(whole_BMN, each)",
        "results = _flat(whole_BMN.flip(0), each)",
        MIXTURE,
        {"dp": 2, "ep": 2},
        MUON,
        "plain",
    ),
    Mutant(
        "an owner puts all its matrices into the first",
        "training.owned_matrices",
        "target = matrices_BMN[slot][",
        "target = matrices_BMN[0][",
        grid=Z2,
        sections=MUON,
    ),
    Mutant(
        "updates have the scale of their tile's shape",
        "training.optimizer",
        "update_scale(shard.global_shape)",
        "update_scale(tuple(update.shape))",
        grid=X2Y2,
        sections=MUON,
    ),
    Mutant(
        "updates have the scale of the shorter side",
        "training.newton_schulz",
        "max(shape[-2:])",
        "min(shape[-2:])",
        sections=MUON,
    ),
    Mutant(
        "Newton-Schulz takes four steps", "training.newton_schulz", "range(STEPS)", "range(STEPS - 1)", sections=MUON
    ),
    Mutant(
        "Newton-Schulz's first coefficient is 3",
        "training.newton_schulz",
        "gram_BMM, x_BMN, beta=a",
        "gram_BMM, x_BMN, beta=3.0",
        sections=MUON,
    ),
    Mutant(
        "Muon's momentum is not Nesterov's",
        "training.optimizer",
        ".lerp(mean, momentum))",
        ".lerp(mean, 1.0))",
        GPT,
        DP2,
        MUON,
    ),
    Mutant(
        "Muon forgets its momentum",
        "training.optimizer",
        "(Matrix(index)), 1 - momentum)",
        "(Matrix(index)), 1.0)",
        grid=DP2,
        sections=MUON,
    ),
    Mutant(
        "Muon's matrices do not decay",
        "training.optimizer",
        "wide.mul_(1 - rate * own.weight_decay)",
        "wide.mul_(1)",
        grid=X2,
        sections=MUON,
    ),
    Mutant(
        "Muon's groups have no learning rate of their own",
        "training.optimizer",
        "rate = lr * own.lr_ratio",
        "rate = lr",
        sections=MUON_GROUPS,
    ),
    Mutant(
        "Muon steps the embeddings",
        "config.optimizer_rules",
        'name.startswith("layers.") and dims > 1',
        "dims > 1",
        grid=Z2,
        sections=MUON,
    ),
    Mutant(
        "Muon steps the routers",
        "config.optimizer_rules",
        "dims > 1 and not of_router",
        "dims > 1",
        MIXTURE,
        {},
        MUON,
        "plain",
    ),
    Mutant(
        "AdamW steps the adapters",
        "config.optimizer_rules",
        'return "muon" if name.startswith("layers.")',
        'return "muon" if name.startswith("none")',
        sections=MUON | LORA,
        against="plain",
    ),
    Mutant(
        "a resumed run has no momentum",
        "checkpoints.checkpoint",
        "trained_parts(job, state.has_averages))",
        '{n: p for n, p in trained_parts(job, state.has_averages).items() if "momentum" not in n})',
        grid=X2,
        sections=MUON,
    ),
    Mutant(
        "Lion's betas are exchanged",
        "training.optimizer",
        "beta1, beta2 = self.config.betas\n        mean",
        "beta2, beta1 = self.config.betas\n        mean",
        grid=X2,
        sections=LION,
    ),
    Mutant(
        "Lion steps by the mean, not its sign",
        "training.optimizer",
        "update /= update.abs().clamp_(min=self.config.eps)",
        "update /= update.abs().mean()",
        grid=Z2,
        sections=LION,
    ),
    Mutant(
        "Lion's mean is that of its update",
        "training.optimizer",
        "mean.lerp_(grad, 1 - beta2)",
        "mean.lerp_(grad, 1 - beta1)",
        LLAMA,
        DP2,
        LION,
    ),
]
