"""List faults in code that every grid uses: the model, the data, the optimizer, and checkpoints."""

from __future__ import annotations

from mutants import (
    AVERAGE,
    DP2,
    FROM_STEP_1,
    GROUPS,
    HASH,
    ONE_SEQUENCE,
    PACKED,
    SIX_HEADS,
    STATIC,
    TABLE,
    WARMUP,
    X2,
    X2Y2,
    Y2,
    Mutant,
)
from tiny_runs import GEMMA, GPT, LLAMA, NEOX

MODEL = [
    Mutant(
        "queries get no rotary embedding",
        "models.causal_attention:AttentionCore.attend_heads",
        "q_BSND = apply_rope(q_BSND, context.cos_BS1d[:, queries], context.sin_BS1d[:, queries])",
        "apply_rope(q_BSND, context.cos_BS1d[:, queries], context.sin_BS1d[:, queries])",
    ),
    Mutant(
        "partial RoPE computes frequencies from the full head width, not from the number of rotary channels",
        "models.rope:rope_frequencies",
        "(-channels / config.rotary_dim)",
        "(-channels / config.head_dim)",
        NEOX,
    ),
    Mutant(
        "RoPE's backward rotates in the same direction as the forward",
        "models.rope:_Rotate.backward",
        "_rotated(grad_BSND, cos_BS1d, -sin_BS1d)",
        "_rotated(grad_BSND, cos_BS1d, sin_BS1d)",
        grid=Y2,
    ),
    Mutant(
        "attention has no causal mask",
        "models.causal_attention:AttentionCore.attend",
        "F.scaled_dot_product_attention( q, k, v, attn_mask=mask, is_causal=mask is None, "
        "scale=self.scale, enable_gqa=k.shape[1] != q.shape[1] )",
        "F.scaled_dot_product_attention( q, k, v, attn_mask=mask, is_causal=False, scale=self.scale, "
        "enable_gqa=k.shape[1] != q.shape[1] )",
    ),
    Mutant(
        "the attention mask lets queries attend to earlier documents",
        "models.causal_attention:causal_within",
        "same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]",
        "same_BSS = documents_BS[:, :, None] >= documents_BS[:, None, :]",
        model=SIX_HEADS,
        grid=X2Y2,
        sections=PACKED | ONE_SEQUENCE,
    ),
    Mutant(
        "GELU is computed exactly, not with its tanh approximation",
        "models.mlp:Activation.forward",
        "self.approximate",
        '"none"',
        GPT,
    ),
    Mutant(
        "GELU is used instead of SiLU",
        "models.mlp:Activation.forward",
        "F.silu(first_BSF)",
        "F.gelu(first_BSF)",
        grid=X2,
    ),
    Mutant(
        "gate and up are swapped",
        "models.mlp:Activation.forward",
        "first_BSF, *up_BSF = gate_and_up_BSF",
        "first_BSF, *up_BSF = gate_and_up_BSF[::-1]",
        grid=X2,
    ),
    Mutant(
        "embeddings are multiplied by the hidden size, not by its square root",
        "models.transformer:Transformer._embed_tokens",
        "self.config.hidden_size**0.5",
        "self.config.hidden_size",
        GEMMA,
    ),
    Mutant(
        "in a block with parallel attention and MLP, the MLP reads the output of attention",
        "models.transformer:AttentionAndMLP.add_outputs",
        "x_BSH if self.parallel_residual else attended_BSH",
        "attended_BSH",
        NEOX,
    ),
    Mutant(
        "the initial scale of weights that write to the residual stream is too large by the square root of 2",
        "models.initialize:_std",
        "math.sqrt(2 * config.num_hidden_layers)",
        "math.sqrt(config.num_hidden_layers)",
    ),
    Mutant(
        "the initial scale of weights that write to the residual stream is computed for one layer too many",
        "models.initialize:_std",
        "math.sqrt(2 * config.num_hidden_layers)",
        "math.sqrt(2 * (config.num_hidden_layers + 1))",
        LLAMA | {"num_hidden_layers": 12},
    ),
    Mutant(
        "all layers have the same initial weights",
        "models.initialize:_block_seed",
        'f"{seed}/{name}/{block}"',
        'f"{seed}/{name.split(chr(46))[-2]}/{block}"',
    ),
    Mutant(
        "initial weights do not depend on the seed",
        "models.initialize:_block_seed",
        'f"{seed}/{name}/{block}"',
        'f"0/{name}/{block}"',
    ),
    Mutant(
        "initial weights have a uniform distribution",
        "models.initialize:_draw",
        "torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), out=out)",
        "out.uniform_(-(3**0.5), 3**0.5, generator=torch.Generator().manual_seed(seed))",
    ),
    Mutant(
        "all blocks of rows of a weight have the same initial values",
        "models.initialize:_fill_normal",
        "_block_seed(seed, name, block)",
        "_block_seed(seed, name, 0) + (rows.start > 0)",
        grid=X2,
    ),
]

DATA = [
    Mutant(
        "labels are not shifted",
        "data.masks:labels_of",
        "labels = windows.tokens[:, 1:].copy()",
        "labels = windows.tokens[:, :-1].copy()",
    ),
    Mutant("the mask of labels is inverted", "data.masks:labels_of", "labels[~mask(windows)]", "labels[mask(windows)]"),
    Mutant(
        "the first token of a document counts as a label",
        "data.masks:document_boundary",
        "windows.documents[:, 1:] == windows.documents[:, :-1]",
        "windows.documents[:, 1:] >= windows.documents[:, :-1]",
    ),
    Mutant(
        "positions do not restart at a new document",
        "data.dataset:positions_of",
        "places - np.maximum.accumulate(np.where(is_start, places, 0), axis=1)",
        "places - 0 * np.where(is_start, places, 0)",
        GPT,
        sections=PACKED,
    ),
    Mutant(
        "every rank reads the same samples",
        "data.loader:Loader.sample_numbers",
        "(micro_batch * self.size + self.rank) * self.micro_batch_size",
        "(micro_batch * self.size) * self.micro_batch_size",
        grid=DP2,
    ),
    Mutant(
        "every micro-batch has the labels of the first micro-batch",
        "data.loader:Loader.assemble",
        "whole.map(itemgetter(row))",
        "replace(whole.map(itemgetter(row)), labels=labels[rows[0]])",
    ),
    Mutant(
        "the goldfish mask drops one token in k + 1, not one in k",
        "data.goldfish:hash_drops",
        "hash64(keys, seed) < np.uint64(2**64 // k)",
        "hash64(keys, seed) < np.uint64(2**64 // (k + 1))",
        sections=HASH,
    ),
    Mutant(
        "the goldfish mask hashes tokens of the previous document",
        "data.goldfish:hash_drops",
        "dropped[:, h:] &= documents[:, h:] == documents[:, :-h]",
        "dropped[:, h:] &= documents[:, h:] >= documents[:, :-h]",
        sections=HASH,
    ),
    Mutant(
        "the static goldfish mask drops the token after the one that it should drop",
        "data.goldfish:Goldfish.__call__",
        "np.arange(targets.shape[1]) % config.k == 0",
        "np.arange(targets.shape[1]) % config.k == 1",
        sections=STATIC,
    ),
    Mutant(
        "with the goldfish strategy `hash-table`, the hash leaves out the target, although `include_target` is true",
        "data.goldfish:hash_table_drops",
        "first = h - 1 if include_target else h",
        "first = h",
        sections=TABLE,
    ),
    Mutant(
        "the goldfish mask already drops tokens before the step `start_step`",
        "data.goldfish:Goldfish.__call__",
        "dropped[windows.numbers < self.first_sample] = False",
        "pass",
        sections=FROM_STEP_1,
    ),
]

TRAINING = [
    Mutant(
        "the first micro-batch of a step is skipped",
        "training.job:Job.forward_backward",
        "enumerate(micro_batches, start=1)",
        "enumerate(micro_batches[1:], start=2)",
    ),
    Mutant(
        "the loss is divided by one rank's number of labels times the number of ranks",
        "training.job:Job.count_kept",
        'return all_reduce(mine, self.grid.tokens, "kept tokens")',
        "return mine * self.grid.tokens.size",
        grid=DP2,
    ),
    Mutant(
        "the reported loss covers only one dp rank",
        "training.job:Job.mean_loss",
        "(self.grid.tokens, self.grid.pp)",
        "(self.grid.pp,)",
        grid=DP2,
    ),
    Mutant(
        "norms have weight decay",
        "training.optimizer:treatment",
        "decay = config.weight_decay if is_matrix(name, dims) else 0.0",
        "decay = config.weight_decay",
    ),
    Mutant(
        "nothing has weight decay",
        "training.optimizer:treatment",
        "decay = config.weight_decay if is_matrix(name, dims) else 0.0",
        "decay = 0.0",
    ),
    Mutant(
        "parameter groups ignore their own learning rates",
        "training.optimizer:ShardedOptimizer.step",
        'group["lr"] = lr * group["lr_ratio"]',
        'group["lr"] = lr',
        sections=GROUPS,
    ),
    Mutant(
        "AdamW uses torch's default betas, not the run file's",
        "training.optimizer:ShardedOptimizer.__init__",
        "torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)",
        "torch.optim.AdamW(groups, lr=config.lr,  eps=config.eps, fused=True)",
    ),
    Mutant(
        "AdamW uses torch's default eps, not the run file's",
        "training.optimizer:ShardedOptimizer.__init__",
        "torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)",
        "torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)",
    ),
    Mutant(
        "the learning-rate schedule ends one step late",
        "training.optimizer:learning_rate",
        "max(1, train_steps - 1 - config.warmup_steps)",
        "max(1, train_steps - config.warmup_steps)",
    ),
    Mutant(
        "the warm-up begins at the peak learning rate",
        "training.optimizer:learning_rate",
        "peak * (step + 1) / config.warmup_steps",
        "peak",
        sections=WARMUP,
    ),
    Mutant(
        "gradients are not clipped",
        "parallel.state:clip_gradients",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale",
        "torch.ones_like(norm) / loss_scale",
        grid=X2,
    ),
    Mutant(
        "the optimizer does nothing",
        "training.optimizer:ShardedOptimizer.step",
        "            self.adamw.step()",
        "            pass",
    ),
    Mutant(
        "gradients are not cleared after the step",
        "training.optimizer:ShardedOptimizer.step",
        "self.drop_gradients()",
        "pass",
        sections={"optimizer": {"name": "lion"}},
    ),
    Mutant(
        "after resuming, AdamW counts its steps from zero",
        "training.optimizer:ShardedOptimizer.set_steps_taken",
        'self.adamw.state[parameter]["step"].fill_(steps)',
        'self.adamw.state[parameter]["step"].fill_(0)',
    ),
    Mutant(
        "a resumed run starts without AdamW's second moment",
        "checkpoints.checkpoint:load_checkpoint",
        "read_parts(path, layout, trained_parts(job, state.has_averages))",
        'read_parts(path, layout, {n: p for n, p in trained_parts(job, False).items() if "exp_avg_sq" not in n})',
    ),
    Mutant(
        "the moving average of the weights swaps decay and 1 - decay",
        "training.weight_average:WeightAverage.update",
        "average.lerp_(shard.local.float(), 1 - self.decay)",
        "average.lerp_(shard.local.float(), self.decay)",
        grid=DP2,
        sections=AVERAGE,
    ),
    Mutant(
        "a resumed run starts a new moving average",
        "checkpoints.checkpoint:_begin_average",
        'if is_loaded:\n    fill_second_copies(trained, lambda index: {"average": '
        "average.averages[index]})\n    average.has_begun = True\nelse:  # a run that has had no average "
        "until now\n    average.restart()",
        'if not is_loaded:\n    fill_second_copies(trained, lambda index: {"average": '
        "average.averages[index]})\n    average.has_begun = True\nelse:  # a run that has had no average "
        "until now\n    average.restart()",
        grid=X2,
        sections=AVERAGE,
    ),
]

STEPS = [*MODEL, *DATA, *TRAINING]
