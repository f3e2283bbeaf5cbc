"""Faults in multi-token prediction."""

from __future__ import annotations

from mutants import CP2, DP2, HASH, ONE_SEQUENCE, PACKED, X2, X2Y2, Mutant
from tiny_runs import DEEPSEEK_V3, LLAMA

ONE, TWO = {"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 2}
HEAVY = {"training": {"mtp_loss_weight": 1.0}}

MULTI_TOKEN = [
    Mutant(
        "prediction layers read the next document's tokens",
        "data.loader:shifted",
        "documents[:, depth:] == documents[:, :-depth]",
        "documents[:, depth:] >= 0",
        LLAMA | ONE,
        {},
        PACKED,
        against="plain",
    ),
    Mutant(
        "prediction layers have labels in the next document",
        "data.loader:Loader.assemble",
        "shifted(each, documents, self.depths)",
        "shifted(each, documents if each is tokens else 0 * documents, self.depths)",
        LLAMA | TWO,
        {},
        HEAVY,
        against="plain",
    ),
    Mutant(
        "the labels of prediction layers are shifted after cp splits the sequence",
        "parallel.attention.context:share_of_sequences",
        "return replace(mine, document_ends=micro_batch.document_ends, reference=micro_batch.reference)",
        "own = mine.labels[:, 1:, None]\n"
        "own = torch.cat([own, torch.full_like(own[:, :1], -100)], dim=1)\n"
        "return replace(mine, document_ends=micro_batch.document_ends, next_labels=own)",
        LLAMA | ONE,
        CP2,
        HEAVY,
        against="plain",
    ),
    Mutant(
        "the tokens of prediction layers are shifted after cp splits the sequence",
        "parallel.attention.context:share_of_sequences",
        "return replace(mine, document_ends=micro_batch.document_ends, reference=micro_batch.reference)",
        "own = torch.cat([mine.tokens[:, 1:, None], mine.tokens[:, :1, None]], dim=1)\n"
        "return replace(mine, document_ends=micro_batch.document_ends, next_tokens=own)",
        LLAMA | ONE,
        CP2,
        HEAVY,
        against="plain",
    ),
    Mutant(
        "prediction layers predict the next token, as the model itself does",
        "data.loader:shifted",
        "np.where(is_same, values[:, depth:], IGNORE_INDEX)",
        "np.where(is_same, values[:, : -depth], IGNORE_INDEX)",
        LLAMA | ONE,
        against="plain",
    ),
    Mutant(
        "prediction layers predict a token that is one place too far ahead",
        "data.loader:Loader.assemble",
        "shifted(each, documents, self.depths)",
        "shifted(each, documents, self.depths + 1)[..., 1:]",
        LLAMA | ONE,
        against="plain",
    ),
    Mutant(
        "prediction layers learn tokens that the goldfish mask drops",
        "data.loader:Loader.assemble",
        "(tokens, labels)",
        "(tokens, np.where(labels == IGNORE_INDEX, windows.tokens[:, 1:], labels))",
        LLAMA | ONE,
        X2,
        HASH,
        against="plain",
    ),
    Mutant(
        "the losses of prediction layers are summed, not averaged",
        "training.later_losses:LaterLosses.__init__",
        "run.training.mtp_loss_weight / depths",
        "run.training.mtp_loss_weight",
        LLAMA | TWO,
        against="plain",
    ),
    Mutant(
        "the losses of prediction layers ignore mtp_loss_weight",
        "training.later_losses:LaterLosses.__init__",
        "run.training.mtp_loss_weight / depths",
        "1 / depths",
        LLAMA | TWO,
        against="plain",
    ),
    Mutant(
        "the losses of prediction layers are divided by the number of labels of the model's own loss",
        "training.job:Job.forward_backward",
        "torch.cat([kept[None], self.later_losses.count(micro_batches)])",
        "kept.expand(1 + self.run.model.num_nextn_predict_layers)",
        LLAMA | ONE,
        {},
        HEAVY,
        against="plain",
    ),
    Mutant(
        "prediction layers assume that all ranks have as many labels as this rank",
        "training.later_losses:LaterLosses.count",
        'all_reduce(mine, self.grid.tokens, "kept tokens")',
        "mine * self.grid.tokens.size",
        LLAMA | ONE,
        DP2,
        HEAVY,
        against="plain",
    ),
    Mutant(
        "the first and the last stage do not sum the gradients of their embedding copies",
        "parallel.pipeline.pipeline:EmbeddingCopies.sum_gradients",
        'gradient.add_(swap(gradient, self.holders, "gradients of the embedding\'s copies"))',
        'swap(gradient, self.holders, "gradients of the embedding\'s copies")',
        LLAMA | ONE,
        {"pp": 2},
        ONE_SEQUENCE,
        against="plain",
    ),
    Mutant(
        "the gradient norm counts both stages' copies of the embedding",
        "parallel.pipeline.pipeline:copies_as_one",
        "2 * shard.replicas",
        "shard.replicas",
        LLAMA | ONE,
        {"pp": 2},
        ONE_SEQUENCE,
        against="plain",
    ),
    Mutant(
        "the projections of prediction layers get only the gradient of one x rank's tokens",
        "parallel.attention.latent_core:LatentLinear.weight_tile",
        'Tile(y=1, partial_over=("x",))',
        "Tile(y=1)",
        LLAMA | ONE,
        X2,
        against="plain",
    ),
    Mutant(
        "on the grid, the expert load of a prediction layer counts for another layer",
        "parallel.decoder:tensor_rules",
        'ParallelMixture(m, grid, overlap, layer=int(name.split(".")[1]))',
        "ParallelMixture(m, grid, overlap, layer=min(int(name.split('.')[1]), model.num_hidden_layers - 1))",
        DEEPSEEK_V3 | ONE,
        {},
        {"moe": {"bias_update_rate": 0.5}},
        against="plain",
    ),
    Mutant(
        "if a token has no next token, prediction layers read the last row of the embedding table",
        "parallel.tensor.embedding:Embedding.look_up",
        "indices_BS - self.x.rank * rows",
        "indices_BS % (rows * self.x.size) - self.x.rank * rows",
        LLAMA | ONE,
        X2Y2,
        HEAVY,
        against="plain",
    ),
]
"""Faults that parity catches."""

PREDICTION_BLOCK = "models.transformer:PredictionBlock.forward"

IN_THE_MODEL = [
    Mutant(
        "the projections of embeddings and hidden states are swapped",
        PREDICTION_BLOCK,
        "self.e_proj(self.embedding_layernorm(next_BSH)) + self.h_proj(self.hidden_layernorm(x_BSH))",
        "self.h_proj(self.embedding_layernorm(next_BSH)) + self.e_proj(self.hidden_layernorm(x_BSH))",
    ),
    Mutant(
        "the norms of embeddings and hidden states are swapped",
        PREDICTION_BLOCK,
        "self.e_proj(self.embedding_layernorm(next_BSH)) + self.h_proj(self.hidden_layernorm(x_BSH))",
        "self.e_proj(self.hidden_layernorm(next_BSH)) + self.h_proj(self.embedding_layernorm(x_BSH))",
    ),
    Mutant(
        "prediction layers read hidden states after the final norm",
        "models.transformer:Transformer._predict",
        "block(x_BSH, contexts[block.layer_type], next_BSH)",
        "block(self.norm(x_BSH) if depth == 0 else x_BSH, contexts[block.layer_type], next_BSH)",
    ),
    Mutant(
        "the second prediction layer reads normalized hidden states",
        PREDICTION_BLOCK,
        "return x_BSH, self.output_layernorm(x_BSH)",
        "normal = self.output_layernorm(x_BSH)\nreturn normal, normal",
    ),
    Mutant(
        "the head reads a prediction layer's output without its norm",
        PREDICTION_BLOCK,
        "return x_BSH, self.output_layernorm(x_BSH)",
        "return x_BSH, x_BSH",
    ),
    Mutant(
        "every prediction layer reads the hidden states of the last decoder layer",
        "models.transformer:Transformer._predict",
        "x_BSH, predicting_BSH = block(x_BSH, contexts[block.layer_type], next_BSH)",
        "_, predicting_BSH = block(x_BSH, contexts[block.layer_type], next_BSH)",
    ),
    Mutant(
        "every prediction layer reads the next token",
        "models.transformer:Transformer._predict",
        "self._embed_tokens(next_tokens_BSD[..., depth])",
        "self._embed_tokens(next_tokens_BSD[..., 0])",
    ),
    Mutant(
        "the gradient of prediction layers does not reach the layers before them",
        "models.transformer:Transformer._predict",
        "block(x_BSH, contexts[block.layer_type], next_BSH)",
        "block(x_BSH.detach(), contexts[block.layer_type], next_BSH)",
    ),
]
"""Faults in code that the reference of parity shares. The second implementation in test_multi_token.py catches them."""
