"""Use a model of the transformers library as the reference of parity. Its code is independent of fourfold, except that
fourfold maps the names of the weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fourfold.config.run import RunConfig
from fourfold.data.transformers_tokenizer import import_transformers
from fourfold.huggingface.architectures.rope_keys import FULL, SLIDING
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.huggingface.expert_files import in_modules, rows_in_files
from fourfold.huggingface.weight_names import name_map
from fourfold.verification.one_process import Logits, Parameters
from fourfold.verification.reference_batches import Sequences


def transformers_logits(run: RunConfig, device: torch.device) -> Logits:
    """Return a function that computes logits with a model of transformers. The run's section [model] describes this
    model.

    Raises:
        UserError: transformers is not installed, or it has no model that computes the same as [model] describes.
    """
    config: dict[str, Any] = config_of(run.model)
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager"
    )
    model = model.to(device).eval()  # Some families have dropout, and eval() switches it off.
    tensors, rows = name_map(config["model_type"], run.model), rows_in_files(model)
    scale = run.lora.alpha / max(1, run.lora.rank)

    def merged(parameters: Parameters, name: str) -> Tensor:
        """Return a parameter by name. If it has a LoRA adapter, add the adapter's update, alpha / rank · B A."""
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A" not in parameters:
            return parameters[name]
        return parameters[name] + scale * parameters[f"{layer}.lora_B"] @ parameters[f"{layer}.lora_A"]

    def masks(documents_BS: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Return the attention mask for transformers, or one mask per attention type if the model has several types.

        In most models of transformers, this argument replaces the mask of the model's own sliding windows. So the
        returned mask includes the windows.
        """
        windows = {kind: run.model.sliding_window * (kind == SLIDING) for kind in (FULL, SLIDING)}
        by_kind = {kind: _block_diagonal(documents_BS, dtype, window) for kind, window in windows.items()}
        if "layer_types" in config:
            return by_kind
        # GPT-Neo applies its windows in addition to the mask.
        adds_windows = "attention_types" in config
        return by_kind[SLIDING if run.model.sliding_window and not adds_windows else FULL]

    def logits(parameters: Parameters, batch: Sequences) -> Tensor:
        # Padding needs no mask. It comes last, so that no earlier token attends to it, or it is a separate document.
        joined = (t.joined([p.of(merged(parameters, p.name)) for p in t.pieces]) for t in tensors)
        theirs = in_modules(model, rows, {t.name: whole for t, whole in zip(tensors, joined, strict=True)})
        dtype = next(iter(theirs.values())).dtype

        def called(tokens_BS: Tensor, positions_BS: Tensor, mask: Tensor | dict[str, Tensor] | None = None) -> Tensor:
            inputs = {"input_ids": tokens_BS, "position_ids": positions_BS, "attention_mask": mask}
            out: Tensor = functional_call(model, theirs, (), inputs).logits
            return out

        if batch.documents_BS is None:
            return called(batch.tokens_BS, batch.positions_BS)
        # A mask cannot reset the states of linear attention, so compute one document at a time.
        if run.model.linear_layers:
            return _document_by_document(called, batch.tokens_BS, batch.positions_BS, batch.documents_BS)
        return called(batch.tokens_BS, batch.positions_BS, masks(batch.documents_BS, dtype))

    return logits


def _document_by_document(called: Callable[..., Tensor], *tokens_positions_documents: Tensor) -> Tensor:
    """Return the logits [B, S, V]. Call the model separately for each document of each sequence."""
    rows = []
    for tokens_S, positions_S, documents_S in zip(*tokens_positions_documents, strict=True):
        lengths = documents_S.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(tokens_S[None].split(lengths, 1), positions_S[None].split(lengths, 1), strict=True)
        rows.append(torch.cat([called(*part) for part in parts], 1))
    return torch.cat(rows)


def _block_diagonal(documents_BS: Tensor, dtype: torch.dtype, window: int) -> Tensor:
    """Return the mask [B, 1, S, S] that transformers adds to attention scores: 0 if a query may see a key, and the
    dtype's lowest number otherwise. A query sees its own key and the earlier keys of its document. If ``window`` is not
    0, the query sees only the last ``window`` of these keys."""
    is_seen_BSS = (documents_BS[:, :, None] == documents_BS[:, None, :]).tril()
    if window:
        place_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
        is_seen_BSS = is_seen_BSS & (place_S[:, None] < place_S + window)
    mask_BSS = torch.zeros(is_seen_BSS.shape, dtype=dtype, device=documents_BS.device)
    return mask_BSS.masked_fill(~is_seen_BSS, torch.finfo(dtype).min)[:, None]
