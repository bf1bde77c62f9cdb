"""Context parallelism: every rank holds the whole model, and a part of the tokens of every sequence.

Only attention looks at other tokens. In ring attention (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889, section 3) keys
and values travel round the ranks, and each rank adds up what its queries have seen by a running log-sum-exp. The
alternative, with all-to-alls, is in by_hand_ulysses.py. Start it with --strategy context --by-hand.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from common.errors import UserError
from common.model import cross_entropy
from common.strategy import Strategy, require_gradients


def contiguous(rank, size):
    """The two of 2 x `size` chunks of a sequence that a rank holds: neighbours."""
    return 2 * rank, 2 * rank + 1


def zigzag(rank, size):
    """One chunk from the front and its mirror image: under a causal mask all ranks compute equally much
    (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2)."""
    return rank, 2 * size - 1 - rank


def positions(rank, size, time, order):
    """Where in a sequence of `time` tokens those of a rank stand: [time / size] int64."""
    chunks = torch.arange(time).unflatten(0, (2 * size, -1))
    return chunks[list(order(rank, size))].flatten()


def pairs(mine, theirs, causal):
    """Which blocks are to be computed: (index of the query chunk, index of the key chunk, on the diagonal?)."""
    for i, query_chunk in enumerate(mine):
        for j, key_chunk in enumerate(theirs):
            if not causal or key_chunk <= query_chunk:
                yield i, j, causal and key_chunk == query_chunk


def pass_on(tensor):
    """Send `tensor` to the next rank of the ring. Returns a function that waits for the previous rank's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % size)
    works = dist.batch_isend_irecv([send, receive])  # together: a ring of blocking sends may wait for ever

    def wait():
        for work in works:
            work.wait()
        return received

    return wait


def scores(q, k, diagonal):
    """Of queries [..., queries, d] with keys [..., keys, d]; on the diagonal no query sees a later key."""
    products = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if diagonal:
        products = products.masked_fill(torch.ones_like(products, dtype=torch.bool).triu(1), float("-inf"))
    return products


def attend(q, k, v, diagonal):
    """One block: its attention [..., queries, d] and the log-sum-exp of its scores [..., queries, 1]."""
    s = scores(q, k, diagonal)
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp() @ v, lse


def merge(out, lse, block_out, block_lse):
    """Add a block to what the queries have seen so far, in place: weights are rescaled to the new normaliser
    (Milakov & Gimelshein 2018, arXiv:1805.02867)."""
    new = torch.logaddexp(lse, block_lse)
    out.copy_(out * (lse - new).exp() + block_out * (block_lse - new).exp())
    lse.copy_(new)


def attend_backward(q, k, v, diagonal, lse, delta, grad_out):
    """One block's part of the gradients of q, k and v; the block's weights are computed again from the log-sum-exp
    over *all* keys (Dao et al. 2022, FlashAttention, arXiv:2205.14135, appendix B.2)."""
    p = (scores(q, k, diagonal) - lse).exp()
    grad_scores = p * (grad_out @ v.transpose(-2, -1) - delta) / q.shape[-1] ** 0.5
    return grad_scores @ k, grad_scores.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad_out


def halves(tensor):
    """Views of a rank's two chunks."""
    return tensor.chunk(2, dim=-2)


class RingAttention(torch.autograd.Function):
    """q, k, v [batch, heads, time / ranks, d] of this rank's tokens -> the same shape, as if over all tokens."""

    @staticmethod
    def forward(ctx, q, k, v, causal, order):
        rank, size = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), float("-inf"))
        kv = torch.stack([k, v])
        for turn in range(size):
            source = (rank - turn) % size  # whose keys and values are here
            arriving = pass_on(kv) if turn < size - 1 else None  # travels while this rank computes
            for i, j, diagonal in pairs(order(rank, size), order(source, size), causal):
                block = attend(halves(q)[i], *halves(kv)[j], diagonal)
                merge(halves(out)[i], halves(lse)[i], *block)
            kv = arriving() if arriving else None
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.order = causal, order
        return out

    @staticmethod
    def backward(ctx, grad_out):
        rank, size = dist.get_rank(), dist.get_world_size()
        q, k, v, out, lse = ctx.saved_tensors
        delta = (grad_out * out).sum(-1, keepdim=True)
        kv, grad_q, travelling = torch.stack([k, v]), torch.zeros_like(q), None
        for turn in range(size):
            source = (rank - turn) % size
            arriving = pass_on(kv) if turn < size - 1 else None
            grad_kv = torch.zeros_like(kv)
            for i, j, diagonal in pairs(ctx.order(rank, size), ctx.order(source, size), ctx.causal):
                rows = (halves(tensor)[i] for tensor in (lse, delta, grad_out))
                parts = attend_backward(halves(q)[i], *halves(kv)[j], diagonal, *rows)
                for total, part in zip((halves(grad_q)[i], *halves(grad_kv)[j]), parts, strict=True):
                    total += part
            if turn == 0:
                at_home = grad_kv
            else:  # the sum so far follows its keys and values, one turn behind; the last hop brings it home
                travelling = pass_on(grad_kv + travelling() if travelling else grad_kv)
            kv = arriving() if arriving else None
        return grad_q, *(at_home + travelling() if travelling else at_home), None, None


def ring_attention(q, k, v, causal=True, order=zigzag):
    """Attention over the tokens of all ranks, each of which holds the chunks that `order` gives it."""
    with torch.autocast(q.device.type, enabled=False):  # sums of exponentials want 32 bits
        return RingAttention.apply(q.float(), k.float(), v.float(), causal, order).to(q.dtype)


class ContextParallel(Strategy):
    """All ranks read the same batch and keep their chunks of every sequence; attention goes round the ring."""

    attention, order = staticmethod(ring_attention), staticmethod(zigzag)

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.check(model.embedding.positions.num_embeddings, model.blocks[0].attention.heads, ranks.size)
        self.model = model.to(ranks.device)
        for tensor in [*model.parameters(), *model.buffers()]:  # ranks may have been seeded differently
            dist.broadcast(tensor.detach(), src=0)
        self.optimizer = make_optimizer(self.model.parameters())

    @staticmethod
    def check(context, heads, size):
        """Raise UserError for sequences that cannot be cut into two chunks for each of `size` ranks."""
        if context % (2 * size):
            nearest = max(1, round(context / (2 * size))) * 2 * size
            raise UserError(
                f"--context {context} does not divide into {2 * size} chunks, two for each of {size} rank(s); "
                f"the nearest that does is {nearest}"
            )

    def forward(self, tokens, where):
        """The GPT on this rank's tokens [batch, time / ranks], which stand at `where` in the sequence."""
        x = self.model.embedding.tokens(tokens) + self.model.embedding.positions(where)
        for block in self.model.blocks:
            layer, normed = block.attention, block.norm1(x)
            q, k, v = (
                part(normed).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
                for part in (layer.query, layer.key, layer.value)
            )
            x = x + layer.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
            x = x + block.mlp(block.norm2(x))
        return self.model.head(x)

    def step(self, micro_batches):
        rank, size = self.ranks.rank, self.ranks.size
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            where = positions(rank, size, inputs.shape[1], self.order).to(inputs.device)
            with self.autocast():
                # equally many tokens on each rank: its mean is one of `size` equal parts of the mean over all
                part = cross_entropy(self.forward(inputs[:, where], where), targets[:, where])
                part = part / (len(micro_batches) * size)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.sum_gradients()
        dist.all_reduce(loss)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def sum_gradients(self):
        """Every rank has the gradient of its tokens' part of the loss; the whole is their sum. In one message."""
        require_gradients(self.model)
        gradients = [p.grad for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))
