"""Context parallelism: every rank holds the whole model, and a part of the tokens of every sequence.

Only attention looks at other tokens. In ring attention (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889, section 3) keys
and values travel round the ranks, and each rank adds up what its queries have seen by a running log-sum-exp. The
alternative, with all-to-alls, is in by_hand_ulysses.py. Start it with --strategy context --by-hand.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from common.collectives import all_reduce_together, broadcast_module
from common.errors import UserError
from common.mesh import axis
from common.model import cross_entropy
from common.strategy import Strategy, require_gradients


def contiguous(rank, size):  # noqa: ARG001  it is called as zigzag is
    """The two of 2 x `size` chunks of a sequence that a rank holds: neighbours."""
    return 2 * rank, 2 * rank + 1


def zigzag(rank, size):
    """One chunk from the front and its mirror image: under a causal mask all ranks compute equally much
    (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2)."""
    return rank, 2 * size - 1 - rank


def positions(rank, size, time, order, device=None):
    """Where in a sequence of `time` tokens those of a rank stand: [time / size] int64, computed on the device."""
    chunks = torch.arange(time, device=device).chunk(2 * size)
    return torch.cat([chunks[number] for number in order(rank, size)])


def pairs(mine, theirs, causal):
    """Which blocks are to be computed: (index of the query chunk, index of the key chunk, on the diagonal?)."""
    for i, query_chunk in enumerate(mine):
        for j, key_chunk in enumerate(theirs):
            if not causal or key_chunk <= query_chunk:
                yield i, j, causal and key_chunk == query_chunk


def pass_on(tensor, group):
    """Send `tensor` to the next rank of the ring, which is `group`. Returns a function that waits for the tensor of
    the previous rank, of the same shape and type, and returns it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
    works = dist.batch_isend_irecv([send, receive])  # together: a ring of blocking sends may wait for ever

    def wait():
        for work in works:
            work.wait()
        return received

    return wait


def flash_kernels(q):
    """PyTorch's FlashAttention for tensors such as q, forward and backward; None where there is none for them, which is
    so for float32 on GPUs. What they give is rounded to 16 bits, and what they compute with is not."""
    aten, kind, width = torch.ops.aten, q.device.type, q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if kind == "cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        return forward, aten._scaled_dot_product_flash_attention_for_cpu_backward
    new_enough = kind == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if new_enough and torch.backends.cuda.is_flash_attention_available() and width % 8 == 0 and width <= 256:
        return aten._scaled_dot_product_flash_attention, flash_backward_on_gpu
    return None


def flash_backward_on_gpu(grad_out, q, k, v, out, lse, dropout, diagonal):
    """The GPU's kernel takes, beside what the CPU's takes, lengths of sequences and the random state of a dropout,
    which there is not."""
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64)
    lengths = None, None, q.shape[-2], k.shape[-2]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, *lengths, dropout, diagonal, seed, offset.to(q.device)
    )


def scores(q, k, diagonal):
    """The scores of queries [..., queries, d] with keys [..., keys, d], in float32: a rounded score is a wrong
    exponential. On the diagonal no query sees a later key."""
    products = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5
    if diagonal:
        products = products.masked_fill(torch.ones_like(products, dtype=torch.bool).triu(1), float("-inf"))
    return products


def attend(q, k, v, diagonal):
    """One block: its attention [..., queries, d] and the log-sum-exp of its scores [..., queries, 1], both float32."""
    if kernels := flash_kernels(q):
        out, lse, *_ = kernels[0](q, k, v, 0.0, diagonal)
        return out.float(), lse[..., None]
    s = scores(q, k, diagonal)
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp() @ v.float(), lse


def merge(out, lse, block_out, block_lse):
    """Add a block to what the queries have seen so far, in place: weights are rescaled to the new normaliser
    (Milakov & Gimelshein 2018, arXiv:1805.02867)."""
    new = torch.logaddexp(lse, block_lse)
    out.copy_(out * (lse - new).exp() + block_out * (block_lse - new).exp())
    lse.copy_(new)


def attend_backward(q, k, v, diagonal, out, lse, grad_out):
    """One block's part of the gradients of q, k and v, to be added up in float32. `out` and `lse` are over *all* keys:
    from the log-sum-exp the block's weights are computed again (Dao et al. 2022, FlashAttention, arXiv:2205.14135,
    appendix B.2)."""
    if kernels := flash_kernels(q):
        return kernels[1](grad_out, q, k, v, out, lse[..., 0], 0.0, diagonal)
    p = (scores(q, k, diagonal) - lse).exp()
    q, k, v, out, grad_out = (tensor.float() for tensor in (q, k, v, out, grad_out))
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = p * (grad_out @ v.transpose(-2, -1) - delta) / q.shape[-1] ** 0.5
    return grad_scores @ k, grad_scores.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad_out


def halves(tensor):
    """Views of a rank's two chunks."""
    return tensor.chunk(2, dim=-2)


class RingAttention(torch.autograd.Function):
    """q, k, v [batch, heads, time / ranks, d] of this rank's tokens -> the same shape, as if over all tokens.

    Keys and values travel in the type that they have. Their gradients travel in float32, since they are sums, of parts
    of all ranks: rounded to 16 bits at every rank, they would be the less exact the more ranks there are. (PyTorch's
    ring sends them so by default, too.)
    """

    @staticmethod
    def forward(ctx, q, k, v, group, causal, order):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = torch.full_like(out[..., :1], float("-inf"))
        kv = torch.stack([k, v])
        for turn in range(size):
            source = (rank - turn) % size  # whose keys and values are here
            arriving = pass_on(kv, group) if turn < size - 1 else None  # travels while this rank computes
            for i, j, diagonal in pairs(order(rank, size), order(source, size), causal):
                block = attend(halves(q)[i], *halves(kv)[j], diagonal)
                merge(halves(out)[i], halves(lse)[i], *block)
            kv = arriving() if arriving else None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.causal, ctx.order = group, causal, order
        return out

    @staticmethod
    def backward(ctx, grad_out):
        group, rank, size = ctx.group, dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        q, k, v, out, lse = ctx.saved_tensors
        kv, grad_q, travelling = torch.stack([k, v]), torch.zeros_like(q, dtype=torch.float32), None
        for turn in range(size):
            source = (rank - turn) % size
            arriving = pass_on(kv, group) if turn < size - 1 else None
            grad_kv = torch.zeros_like(kv, dtype=torch.float32)
            for i, j, diagonal in pairs(ctx.order(rank, size), ctx.order(source, size), ctx.causal):
                rows = (halves(tensor)[i] for tensor in (out, lse, grad_out))
                parts = attend_backward(halves(q)[i], *halves(kv)[j], diagonal, *rows)
                for total, part in zip((halves(grad_q)[i], *halves(grad_kv)[j]), parts, strict=True):
                    total += part
            if turn == 0:
                at_home = grad_kv
            else:  # the sum so far follows its keys and values, one turn behind; the last hop brings it home
                travelling = pass_on(grad_kv + travelling() if travelling else grad_kv, group)
            kv = arriving() if arriving else None
        grad_k, grad_v = at_home + travelling() if travelling else at_home
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def ring_attention(q, k, v, group, causal=True, order=zigzag):
    """Attention over the tokens of all ranks of `group`, each of which holds the chunks that `order` gives it.

    q, k, v: [batch, heads, time / ranks, d] of this rank's tokens; so is the result.
    """
    with torch.autocast(q.device.type, enabled=False):  # types are chosen above
        return RingAttention.apply(q, k, v, group, causal, order)


def local_tokens(tokens, axis, order=zigzag):
    """This rank's tokens [batch, time / axis.size] out of all tokens [batch, time], inputs or targets."""
    return tokens[:, positions(axis.rank, axis.size, tokens.shape[1], order, tokens.device)]


def apply_context_parallel(model, axis, attention=ring_attention, order=zigzag) -> None:
    """Make a GPT compute with this rank's tokens alone, in place: `model(local_tokens(tokens, axis, order))`.

    Attention is taken over the tokens of all ranks of `axis`, and each token gets the position that it has in the
    whole sequence. All else of the model looks at one token at a time. Parameters stay whole on every rank, and their
    gradients must be summed over the axis. Raises UserError for a context that cannot be cut.

    attention: (q, k, v, group, causal, order) -> output, as ring_attention
    """
    require_chunks(model.embedding.positions.num_embeddings, axis.size)

    def in_the_whole_sequence(_module, args):
        return positions(axis.rank, axis.size, len(args[0]) * axis.size, order, args[0].device)

    model.embedding.positions.register_forward_pre_hook(in_the_whole_sequence)
    for block in model.blocks:
        block.attention.forward = functools.partial(attention_forward, block.attention, attention, axis.group, order)


def attention_forward(layer, attention, group, order, x):
    """The forward pass of common/model.py's Attention, with another function for attention itself."""
    q, k, v = (
        part(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2) for part in (layer.query, layer.key, layer.value)
    )
    return layer.out(attention(q, k, v, group, True, order).transpose(1, 2).flatten(-2))


class ContextParallel(Strategy):
    """All ranks read the same batch and keep their chunks of every sequence; attention goes round the ring."""

    preset = {"context": -1}
    tasks = ("text",)
    attention, order = staticmethod(ring_attention), staticmethod(zigzag)

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_chunks(config.context, axes["context"])

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.axis = axis(self.mesh, "context")
        broadcast_module(model, self.axis.group)  # ranks may have been seeded differently
        apply_context_parallel(model, self.axis, self.attention, self.order)
        self.model = model.to(self.device)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            inputs, targets = (local_tokens(tokens, self.axis, self.order) for tokens in (inputs, targets))
            with self.autocast():
                # equally many tokens on each rank: its mean is one of `size` equal parts of the mean over all
                part = cross_entropy(self.model(inputs), targets) / (len(micro_batches) * self.axis.size)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.sum_gradients()
        dist.all_reduce(loss, group=self.axis.group)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def evaluate(self, inputs, targets):
        loss = super().evaluate(*(local_tokens(tokens, self.axis, self.order) for tokens in (inputs, targets)))
        dist.all_reduce(loss, group=self.axis.group)  # of equally many tokens each
        return loss / self.axis.size

    def sum_gradients(self):
        """Every rank has the gradient of its tokens' part of the loss; the whole is their sum. In one message."""
        require_gradients(self.model)
        all_reduce_together([p.grad for p in self.model.parameters() if p.requires_grad], self.axis.group)


def require_chunks(context, size):
    """Raise UserError for sequences that cannot be cut into two chunks for each of `size` ranks."""
    if context % (2 * size):
        nearest = max(1, round(context / (2 * size))) * 2 * size
        raise UserError(
            f"--context {context} does not divide into {2 * size} chunks, two for each of {size} rank(s); "
            f"the nearest that does is {nearest}"
        )
