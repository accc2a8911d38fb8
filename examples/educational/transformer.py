"""A small GPT-2, whole in one process or cut over several, with its vocabulary whole or cut as well.

    python transformer.py
    torchrun --nproc_per_node 2 transformer.py --tensor-parallel
    torchrun --nproc_per_node 2 transformer.py --tensor-parallel --loss-parallel

All print the same losses. ``mlp.py`` explains f, g, and why columns come first.
"""

# B batch, S sequence, H hidden, N heads, D head dim, V vocabulary, T = S - 1 tokens with a next one
# lower case: the local shard (n = N / tensor, h = H / tensor, v = V / tensor)

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import add_arguments, profiled, report, start
from torch import Tensor, nn
from torch.profiler import record_function

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.tensor_parallel.layers import (
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardformer.tensor_parallel.vocab_parallel_loss import cross_entropy_1d

SEED, NUM_STEPS = 1234, 5
VOCAB_SIZE, BLOCK_SIZE, NUM_HEADS, NUM_LAYERS = 50257, 1024, 8, 2
TEXT = "i love tensor parallelism."
# token ids of TEXT in GPT-2's vocabulary; --tokenizer computes them
TOKEN_IDS = [72, 1842, 11192, 273, 10730, 1042, 13]

Layer = Callable[..., nn.Module]


@dataclass(frozen=True)
class Layers:
    """Layer classes at the places where the model can be sharded. The defaults build the plain model."""

    column: Layer = nn.Linear
    row: Layer = nn.Linear
    embedding: Layer = nn.Embedding
    head: Layer = nn.Linear

    @classmethod
    def cut(cls, axis: Axis, vocabulary: bool) -> Layers:
        """Return parallel layers. Each draws the full weight and keeps its shard, as the plain model with this seed."""
        column, row = partial(Linear1D_Col, process_group=axis), partial(Linear1D_Row, process_group=axis)
        if not vocabulary:
            return cls(column, row)
        embedding = partial(VocabParallelEmbedding1D, process_group=axis)
        return cls(column, row, embedding, partial(VocabParallelLMHead1D, process_group=axis))


class Attention(nn.Module):
    """(B, S, H) -> (B, S, H). Columns, then rows, as in an MLP: heads take the place of ReLU's single numbers.

    The softmax of a head needs its q, k and v and nothing of other heads, so a rank that holds whole heads gets from
    x to the last product without a word; q, k and v are column-parallel, o is row-parallel and ends with g.
    """

    def __init__(self, hidden: int, layers: Layers) -> None:
        super().__init__()
        self.head_dim = hidden // NUM_HEADS
        self.q_proj = layers.column(hidden, hidden, bias=False)
        self.k_proj = layers.column(hidden, hidden, bias=False)
        self.v_proj = layers.column(hidden, hidden, bias=False)
        self.o_proj = layers.row(hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        # f three times: backward sums x's gradient over the ranks for q, for k and for v. (A sharded model that
        # shard_model makes adds them up first, and sums once.)
        q_BnSD, k_BnSD, v_BnSD = (
            # -1 is n: N in the plain model, N / tensor in the cut one, and nothing else differs
            project(x_BSH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BnSD = F.scaled_dot_product_attention(q_BnSD, k_BnSD, v_BnSD, is_causal=True)
        return self.o_proj(y_BnSD.transpose(1, 2).flatten(-2))


class ResidualBlock(nn.Module):
    """(B, S, H) -> (B, S, H). Norms and residual sums are computed by every rank, on the same numbers."""

    def __init__(self, hidden: int, layers: Layers) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(hidden, bias=False)
        self.attn = Attention(hidden, layers)
        self.ln2 = nn.LayerNorm(hidden, bias=False)
        self.ffn1 = layers.column(hidden, 4 * hidden, bias=False)
        self.ffn2 = layers.row(4 * hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attn(self.ln1(x_BSH))
        return x_BSH + self.ffn2(F.gelu(self.ffn1(self.ln2(x_BSH))))


class Transformer(nn.Module):
    """Token ids (B, S) -> logits (B, S - 1, V) of each next token. With a cut vocabulary a rank computes v of V."""

    def __init__(self, vocab_size: int, hidden: int, layers: Layers) -> None:
        super().__init__()
        self.wte = layers.embedding(vocab_size, hidden)
        self.wpe = nn.Embedding(BLOCK_SIZE, hidden)
        self.blocks = nn.ModuleList(ResidualBlock(hidden, layers) for _ in range(NUM_LAYERS))
        self.ln = nn.LayerNorm(hidden, bias=False)
        self.head = layers.head(hidden, vocab_size, bias=False)
        # One weight (V, H) for both. The head's output features are the embedding's rows, so cutting the vocabulary
        # gives both the same part of it: the head is column-parallel and begins with f; the embedding looks up the
        # tokens it holds, gives 0 for the others, and ends with g, as a row-parallel layer does.
        self.wte.weight = self.head.weight

    def forward(self, ids_BS: Tensor) -> Tensor:
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        x_BSH = self.wte(ids_BS) + self.wpe(positions_S)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        # The last token has no label, so its logits are not computed.
        return self.head(self.ln(x_BSH)[:, :-1])


def loss_of(logits_BTV: Tensor, labels_BT: Tensor, args: argparse.Namespace, context: ParallelContext) -> Tensor:
    """Compute the cross entropy: the log of the sum of exp(logits), minus the logit of the label.

    With sharded logits, F.cross_entropy communicates three numbers per token: the largest local logit, the sum of
    exponentials relative to it, and the label's logit (see ``shardformer.tensor_parallel.vocab_parallel_loss``). In one
    process, the same code runs with one rank that stores all logits.
    """
    if args.loss_parallel and not args.tensor_parallel:
        return cross_entropy_1d(logits_BTV, labels_BT, process_group=context.tensor)
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def check_heads(hidden: int, axis: Axis) -> None:
    if hidden % NUM_HEADS or NUM_HEADS % axis.size:
        raise ConfigError(
            f"--hidden is {hidden}, with {NUM_HEADS} heads on {axis.size} tensor ranks.",
            rule="The heads divide the hidden size, and every rank holds as many whole heads as the others.",
            remedy=f"Use a multiple of {NUM_HEADS}, and 1, 2, 4 or 8 processes.",
        )


def read_tokens(args: argparse.Namespace) -> tuple[int, Tensor]:
    """The size of the vocabulary and the token ids (1, S) of the text."""
    if args.tokenizer is None:
        return VOCAB_SIZE, torch.tensor([TOKEN_IDS])
    from transformers import GPT2Tokenizer

    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        vocab, merges = (args.tokenizer / name for name in names)
        if vocab.is_file() and merges.is_file():
            tokenizer = GPT2Tokenizer(str(vocab), str(merges))
            return len(tokenizer), torch.tensor([tokenizer(TEXT)["input_ids"]])
    raise ConfigError(
        f"--tokenizer is {str(args.tokenizer)!r}, which holds no GPT-2 vocabulary.",
        rule="The files are vocab.json and merges.txt, or encoder.json and vocab.bpe.",
        remedy="Name the folder with these files, or leave the option out: the ids of this text are known.",
    )


def make_batch(args: argparse.Namespace, vocab_size: int, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (B, S) and labels (B, S - 1): the text, or random tokens of which the last tenth is padding."""
    if not args.batch_size:
        return ids_BS, ids_BS[:, 1:]
    num_padded = args.seq_len // 10
    ids_BS = torch.randint(vocab_size, (args.batch_size, args.seq_len))
    padding = torch.full((args.batch_size, num_padded), -100)
    return ids_BS, torch.cat((ids_BS[:, 1 : args.seq_len - num_padded], padding), 1)


def train(model: nn.Module, ids: Tensor, labels: Tensor, args: argparse.Namespace, context: ParallelContext) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, NUM_STEPS + 1):
        with record_function(f"step {step}"):
            loss = loss_of(model(ids), labels, args, context)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if context.tensor.rank == 0:
            print(f"iter {step}  loss {loss.item():.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2, with or without tensor parallelism.")
    add_arguments(parser)
    parser.add_argument("--loss-parallel", action="store_true", help="shard the vocabulary of embedding, head and loss")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=0, help="train on random tokens instead of the text")
    parser.add_argument("--seq-len", type=int, default=0, help=f"length of the random sequences, at most {BLOCK_SIZE}")
    parser.add_argument("--tokenizer", type=Path, help="folder with the vocabulary files of GPT-2")
    args = parser.parse_args()
    if (args.batch_size > 0) != (args.seq_len > 1) or args.seq_len > BLOCK_SIZE:
        parser.error(f"pass both --batch-size and --seq-len (2 to {BLOCK_SIZE}), or neither to train on the text")
    context = start(args)
    check_heads(args.hidden, context.tensor)
    vocab_size, text_ids = read_tokens(args)
    size = f"{args.batch_size} x {args.seq_len} random tokens" if args.batch_size else "one sentence"
    with (
        profiled("transformer", f"hidden {args.hidden}, {size}", args, context),
        CollectiveRecorder(context) as recorder,
    ):
        with record_function("build"):
            torch.manual_seed(SEED)
            layers = Layers.cut(context.tensor, args.loss_parallel) if args.tensor_parallel else Layers()
            model = Transformer(vocab_size, args.hidden, layers).to(context.device)
            # drawn after the weights, which use the same random numbers on every rank as in one process
            ids, labels = (x.to(context.device) for x in make_batch(args, vocab_size, text_ids))
        train(model, ids, labels, args, context)
    report(model, recorder, NUM_STEPS, context)


if __name__ == "__main__":
    main()
