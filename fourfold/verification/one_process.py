"""Train a run on one process, as the reference for parity. The code is independent of the trainer.

Loss, clipping, and AdamW come from torch. Labels, the learning-rate schedule, all other optimizers, and the settings of
parameter groups are implemented a second time. The trainer and this file share only the code that draws the random
samples and (unless the reference is a model of transformers) the code of the decoder.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fourfold.config.run import RunConfig
from fourfold.models.mixture import Mixture, Routing, is_router_bias
from fourfold.training.job import build_model
from fourfold.verification.deviation import amplification
from fourfold.verification.float64 import InFloat64
from fourfold.verification.reference_batches import Sequences
from fourfold.verification.reference_labels import document_ends
from fourfold.verification.reference_optimizer import ReferenceOptimizer

Parameters = Mapping[str, Tensor]


class Figures(NamedTuple):
    """The results of one training step."""

    loss: Tensor
    grad_norm: Tensor
    """Gradient norm before clipping."""
    gradients: dict[str, Tensor]
    """Gradients before clipping, by parameter name."""
    extra_metrics: dict[str, Tensor]
    """More metrics by name. In preference training (section [dpo]), the metrics of the preference pairs before the
    update. With multi-token prediction, the mean loss of the prediction layers. Otherwise empty."""


Logits = Callable[[Parameters, Sequences], Tensor]
"""A function that computes logits [B, S, V] from two arguments: the parameters by fourfold's names, and the sequences.
If ``documents_BS`` of the sequences is not None, a token may attend only to tokens of the same document. If
``later_tokens_BSD`` is not None (multi-token prediction), the function returns the logits of the model, followed by the
logits of each of D prediction layers, [1 + D, B, S, V]."""


class Reference:
    """A model that one process trains, in float32 or float64."""

    loss_scale = 1.0
    """The factor that the loss is multiplied by before the backward pass. Gradients are divided by it afterwards."""

    def __init__(
        self, run: RunConfig, logits: Logits, weights: Parameters, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.run, self.logits, self.device, self.dtype = run, logits, device, dtype
        copies = {name: weight.to(device, dtype, copy=True) for name, weight in weights.items()}
        self.frozen = {name: copy for name, copy in copies.items() if run.lora.rank and ".lora_" not in name}
        self.trained = {name: nn.Parameter(copy) for name, copy in copies.items() if name not in self.frozen}
        self.optimizer = ReferenceOptimizer(self.trained, run)
        self.router_losses = RouterLosses(run, device)
        self.averages: dict[str, Tensor] = {}
        """Moving averages of the trained weights. Empty if the run has none."""
        self.pairs: list[Tensor] = []
        """With [dpo], a tensor [2, P] for each forward pass: the margins of the P preference pairs, and the rewards of
        their chosen answers."""

    @torch.no_grad()
    def evaluate(self, batch: Sequences, averaged: bool = False) -> dict[str, Tensor]:
        """Return the mean loss of a batch under the key "loss". With [dpo], also return the metrics of the batch's
        preference pairs. As in validation, experts have no capacity limit.

        Args:
            batch: The sequences.
            averaged: Whether to use the moving averages in place of the weights.
        """
        batch = replace(batch, later_tokens_BSD=None)
        with self._evaluating():
            loss = self._loss(batch, self.parameters(averaged)) / self._units(batch)
        return {"loss": loss, **self._take_preferences()}

    @torch.no_grad()
    def log_probabilities(self, batch: Sequences) -> Tensor:
        """Return the log-probability of each sequence under the current weights, [B]. Only tokens in the loss count."""
        with self._evaluating():
            return self._answers(batch, self.parameters())

    @torch.no_grad()
    def next_token_logits(self, tokens_T: Tensor) -> Tensor:
        """Return the logits [T - 1, V] after each token of a document except the last token."""
        tokens_1T = tokens_T[None]
        inputs_1S, targets_1S = tokens_1T[:, :-1], tokens_1T[:, 1:]
        positions_1S = torch.arange(inputs_1S.shape[1], device=self.device)[None]
        batch = Sequences(inputs_1S, targets_1S, torch.ones_like(inputs_1S, dtype=torch.bool), positions_1S)
        with self._evaluating():
            return self.logits(self.parameters(), batch).to(self.dtype)[0]

    def step(self, step: int, batch: Sequences, max_grad_norm: float) -> Figures:
        """Take one training step on a batch, and return its results.

        Args:
            step: Index of the step. It determines the learning rate.
            batch: All sequences of the step.
            max_grad_norm: The clipping limit of the gradient norm.
        """
        size = self.run.training.micro_batch_size
        loss = torch.zeros((), dtype=self.dtype, device=self.device)
        with self._precision():
            for first in range(0, len(batch.tokens_BS), size):
                rows = slice(first, first + size)
                part = self._loss(batch.part(rows), self.parameters()) / self._units(batch)
                total = part if part.ndim == 0 else part[0] + self.run.training.mtp_loss_weight * part[1:].mean()
                (self.loss_scale * (total + self.router_losses.of(self.logits, batch, rows))).backward()
                self.after_backward()
                loss = loss + part.detach()
        for p in self.trained.values():
            if p.grad is not None:
                p.grad /= self.loss_scale
        gradients = {name: p.grad.clone() for name, p in self.trained.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(self.trained.values(), max_grad_norm)
        self.optimizer.step(learning_rate(step, self.run))
        self.after_step()
        self._average()
        self.router_losses.end_step(self.trained)
        if loss.ndim:
            return Figures(loss[0], norm, gradients, {"mtp_loss": loss[1:].mean()})
        return Figures(loss, norm, gradients, self._take_preferences())

    def parameters(self, averaged: bool = False) -> Parameters:
        """Return the weights that the model computes with. If ``averaged`` is set, moving averages replace the trained
        weights."""
        return {**self.frozen, **self.trained, **(self.averages if averaged else {})}

    def after_backward(self) -> None:
        """Do nothing. Subclasses override this hook, which is called after the backward pass of each micro-batch."""

    def after_step(self) -> None:
        """Do nothing. Subclasses override this hook, which is called after each optimizer step."""

    def _average(self) -> None:
        decay = self.run.ema.decay
        for name, weight in self.trained.items() if decay else ():
            if is_router_bias(name):  # The grid does not average router biases either.
                continue
            before = self.averages.get(name, weight.detach())
            self.averages[name] = decay * before + (1 - decay) * weight.detach()

    def uncut_weights(self) -> dict[str, Tensor]:
        """Return the weights that the run would have if Lion did not limit its updates to ±1. Empty for other
        optimizers."""
        return {name: self.trained[name].detach() - cut for name, cut in self.optimizer.cut.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return frozen and trained weights. The trained weights are copies, so later steps do not change the
        result."""
        return {**self.frozen, **{name: p.detach().clone() for name, p in self.trained.items()}}

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Compute in the reference's precision and in evaluation mode while the ``with`` block runs."""
        with self._precision(), self.logits.evaluating() if isinstance(self.logits, PlainLogits) else nullcontext():
            yield

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        return InFloat64() if self.dtype == torch.float64 else nullcontext()

    def _units(self, batch: Sequences) -> Tensor | int:
        """Return the divisor of the mean loss: the number of labels in the loss, or with [dpo], the number of
        preference pairs. With prediction layers, return the number for the model, and then the number for each
        prediction layer."""
        if batch.later_tokens_BSD is not None and batch.later_kept_BSD is not None:
            return torch.stack([batch.kept_BS.sum(), *batch.later_kept_BSD.sum((0, 1)).clamp(min=1)])
        return batch.kept_BS.sum() if batch.reference_B is None else len(batch.kept_BS) // 2

    def _loss(self, batch: Sequences, parameters: Parameters) -> Tensor:
        """Return the sum of the token losses. With [dpo], return the sum of the losses of the preference pairs. With
        prediction layers, return the sum for the model, and then the sum for each prediction layer."""
        if batch.reference_B is not None:
            answers_B = self._answers(batch, parameters)
            gains_B = self.run.dpo.beta * (answers_B - batch.reference_B.to(answers_B.dtype))
            margins_P = gains_B[0::2] - gains_B[1::2]
            self.pairs.append(torch.stack([margins_P, gains_B[0::2]]).detach())
            return (1 + (-margins_P).exp()).log().sum()
        logits_BSV, kept_BS = self.logits(parameters, batch).float(), batch.kept_BS
        if batch.later_tokens_BSD is not None:
            assert batch.later_targets_BSD is not None and batch.later_kept_BSD is not None
            targets = [batch.targets_BS, *batch.later_targets_BSD.unbind(2)]
            kept = [kept_BS, *batch.later_kept_BSD.unbind(2)]
            each = zip(logits_BSV, targets, kept, strict=True)
            return torch.stack([F.cross_entropy(own[k], labels[k], reduction="sum") for own, labels, k in each])
        return F.cross_entropy(logits_BSV[kept_BS], batch.targets_BS[kept_BS], reduction="sum")

    def _answers(self, batch: Sequences, parameters: Parameters) -> Tensor:
        """Return the log-probability of each sequence, [B]: the sum over the tokens that are in the loss."""
        log_probs_BSV = self.logits(parameters, batch).float().log_softmax(-1)
        log_probs_BS = log_probs_BSV.gather(-1, batch.targets_BS[:, :, None])[..., 0]
        return (log_probs_BS * batch.kept_BS).sum(1)

    def _take_preferences(self) -> dict[str, Tensor]:
        """Return the mean metrics of all preference pairs since the previous call of this method. The keys are the
        names in metrics.jsonl. Without [dpo], the result is empty.

        The additional key ``dpo_ties`` is the share of pairs with a margin near zero. Rounding may change the sign of
        such a margin.
        """
        if not self.pairs:
            return {}
        margins_P, rewards_P = torch.cat(self.pairs, dim=1)
        self.pairs.clear()
        nearly_zero = 100 * amplification(self.run) * torch.finfo(torch.float32).eps
        shares = {"dpo_accuracy": margins_P > 0, "dpo_ties": margins_P.abs() < nearly_zero}
        found = {name: is_so_P.double().mean() for name, is_so_P in shares.items()}
        return {"dpo_margin": margins_P.mean(), "dpo_chosen_reward": rewards_P.mean(), **found}


class PlainLogits:
    """Computes logits with fourfold's decoder in plain PyTorch, on one process (see ``Logits``)."""

    def __init__(self, run: RunConfig) -> None:
        with torch.device("meta"):
            self.model = build_model(run)
        self.routings: dict[int, Routing] = {}
        """The most recent output of each router, by layer."""
        for layer, block in self.model.layers.items():
            if isinstance(block.mlp, Mixture):
                block.mlp.gate.register_forward_hook(partial(self._note, int(layer)))

    def __call__(self, parameters: Parameters, batch: Sequences) -> Tensor:
        document_ends_BE = None if batch.documents_BS is None else document_ends(batch.documents_BS)
        inputs = (batch.tokens_BS, None, batch.positions_BS, document_ends_BE)
        more = {"is_data_BS": batch.is_data_BS, "next_tokens_BSD": batch.later_tokens_BSD}
        out: Tensor = functional_call(self.model, dict(parameters), inputs, more)
        return out

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch the decoder to evaluation mode while the ``with`` block runs."""
        self.model.eval()
        yield
        self.model.train()

    def _note(self, layer: int, router: nn.Module, inputs: tuple[Tensor, ...], routing: Routing) -> None:
        self.routings[layer] = routing


class RouterLosses:
    """Computes the auxiliary losses of routers, and updates the biases of routers.

    Padding is not counted. The load-balancing loss uses the experts' load in the previous step.
    """

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.load: dict[int, Tensor] = {}
        self.rows: dict[int, Tensor] = {}

    def of(self, logits: Logits, batch: Sequences, sequences: slice) -> Tensor:
        """Return the router losses of the decoder's most recent forward pass. Also count how many tokens each expert
        got.

        The losses are divided by the number of tokens in the whole step, without padding.

        Args:
            logits: The function that made the forward pass. Only ``PlainLogits`` has router losses.
            batch: All sequences of the step.
            sequences: The sequences in the forward pass.
        """
        run, model = self.run, self.run.model
        all_BS = torch.ones_like(batch.tokens_BS, dtype=torch.bool) if batch.is_data_BS is None else batch.is_data_BS
        is_data_T = all_BS[sequences].flatten()
        total = torch.zeros((), device=self.device)
        for layer, routing in logits.routings.items() if isinstance(logits, PlainLogits) else ():
            logits_TE, experts = routing.logits_TE[is_data_T], torch.arange(model.num_experts, device=self.device)
            rows = (routing.experts_TK[is_data_T][..., None] == experts).sum((0, 1))
            self.rows[layer] = self.rows.get(layer, torch.zeros_like(rows)) + rows
            scores_TE = logits_TE.softmax(-1) if model.router_score == "softmax" else logits_TE.sigmoid()
            probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            even_E = torch.full_like(logits_TE[0], 1 / model.num_experts)
            share_E = self.load.get(layer, even_E).to(logits_TE.dtype)
            balance = model.num_experts * (probabilities_TE * share_E).sum()
            z = logits_TE.exp().sum(-1).log().pow(2).sum()
            total = total + run.moe.load_balancing_loss * balance + run.moe.z_loss * z
        return total / all_BS.sum()

    @torch.no_grad()
    def end_step(self, parameters: Parameters) -> None:
        """Keep the experts' load in this step for the load-balancing loss of the next step. Then update the biases of
        the routers, which are among ``parameters``."""
        for layer, rows in self.rows.items():
            self.load[layer] = rows.double() / rows.sum()
            bias = parameters.get(f"layers.{layer}.mlp.gate.e_score_correction_bias")
            if bias is not None:
                bias += self.run.moe.bias_update_rate * (rows.sum() - len(rows) * rows).sign()
        self.rows.clear()


def learning_rate(step: int, run: RunConfig) -> float:
    """Return the learning rate of the step with this index. The rate warms up to its peak, and then it is constant or
    decays until the last step."""
    peak, plan, last = run.optimizer.lr, run.lr_scheduler, run.training.train_steps - 1
    if step < plan.warmup_steps:
        return peak * (step + 1) / plan.warmup_steps
    start = float(plan.warmup_steps)
    if plan.decay_style == "wsd":
        start = last - max(1.0, min(plan.decay_ratio * (last + 1), last + 1 - plan.warmup_steps))
    passed = min(max(step - start, 0) / max(last - start, 1), 1.0)
    low = peak * plan.min_lr_ratio
    if plan.decay_style == "constant":
        return peak
    if plan.decay_style == "cosine":
        return low + (peak - low) * (1 + math.cos(math.pi * passed)) / 2
    return peak + (low - peak) * passed
