"""What each of two processes does; the first writes the trained weights to a file.

usage: python tests/processes.py 2 two_processes.py FILE
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fasterqk import LogitMonitor, find_circuits, make_optimizer, qk_clip
from fasterqk.errors import InputError

STEPS, ROWS, LENGTH, VOCABULARY = 6, 6, 8, 20
THRESHOLD = 2.0  # of qk_clip


def gpt2():
    """Queries, keys and values in one weight."""
    torch.manual_seed(0)
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=16, n_positions=LENGTH, **off)
    )


def llama():
    """Separate projections, keys and values of half the heads."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=16,
            intermediate_size=24,
            max_position_embeddings=LENGTH,
        )
    )


def batches():
    """Rows with a different number of labels each."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draw)
        labels = ids.clone()
        for row in range(ROWS):
            labels[row, : row + 1] = -100
        yield ids, labels


def trained(model, wrap=None, rank=0, processes=1):
    """After a few steps on this process's share of every batch."""
    wrapped = model if wrap is None else wrap(model)
    optimizer = make_optimizer(wrapped, optim.AdamW, lr=1e-2, qk_ratio=10, weight_decay=0.1)
    for ids, labels in batches():
        mine = slice(rank, None, processes)
        logits = wrapped(input_ids=ids[mine]).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[mine, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        # Gradients are averaged over processes: each is weighted by its share of all labels.
        (loss * processes / (labels[:, 1:] != -100).sum()).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def accelerated(way):
    """The same under Accelerate, which joins the processes itself.

    It prepares the model "first", or "together" with the optimizer; not at all if the model is "sharded".
    Its own FSDP2 needs another device: on CPU it ignores the plugin and wraps the model in DDP.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    wrap = {"first": accelerator.prepare, "sharded": fully_shard}.get(way)
    model = gpt2() if wrap is None else wrap(gpt2())
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10, weight_decay=0.1)
    if way == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
    for ids, labels in batches():
        mine = slice(rank, None, processes)
        logits = model(input_ids=ids[mine]).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[mine, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        accelerator.backward(loss * processes / (labels[:, 1:] != -100).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"processes": torch.tensor(processes), **weights(accelerator.unwrap_model(model))}


def clipped(model, wrap=None, rank=0, processes=1):
    """The same with large logits and qk_clip; returns the model, the clip and the monitor's maxima."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "c_attn.weight")):
                parameter *= 20
    wrapped = model if wrap is None else wrap(model)
    optimizer = optim.SGD(wrapped.parameters(), lr=0.1)
    clip = qk_clip(wrapped, optimizer, THRESHOLD)
    monitor = LogitMonitor(wrapped, optimizer, every=STEPS, limit=1e6)
    for ids, _ in batches():
        wrapped(input_ids=ids[rank::processes]).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, clip, torch.cat([reading.logit for reading in monitor.last.readings.values()])


def weights(model):
    """Whole tensors, also of a sharded model."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def sharded(model, attention_too=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
        if attention_too:
            fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class CausalSelfAttention(nn.Module):
    """Half of the rows of ``q_proj`` are a gate on the output, of which the names say nothing."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 32), nn.Linear(16, 16)
        self.v_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, gate = self.q_proj(x).chunk(2, -1)
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, self.k_proj(x), self.v_proj(x))
        )
        context = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o_proj(context * gate.sigmoid())


def gated():
    """Two layers of gated attention and a norm."""
    torch.manual_seed(0)
    return nn.Sequential(CausalSelfAttention(), CausalSelfAttention(), nn.LayerNorm(16))


def refused_in_training(own_unit):
    """What the first training pass says of a sharded model, and whether every weight is as it was."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = gated()
    for layer in model[:2] if own_unit else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = weights(model)
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10)
    try:
        model(torch.randn(2, 5, 16)).square().mean().backward()
        optimizer.step()
    except InputError as error:
        said = str(error)
        same = all(torch.equal(value, before[name]) for name, value in weights(model).items())
        return f"{same} {said}"
    return "nothing"


class NormalisedAttention(nn.Module):
    """Queries of length one, by no parameter: scaling their weights changes nothing."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in projections)
        q = nn.functional.normalize(q, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def refused_by_clip():
    """What qk_clip says to attention with norms that is itself a unit of FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(fully_shard(NormalisedAttention(), mesh=mesh), nn.LayerNorm(16))
    fully_shard(model, mesh=mesh)
    try:
        qk_clip(model, optim.SGD(model.parameters(), lr=0.0), circuits=gathered_labels())
        model(torch.randn(2, 5, 16)).pow(3).sum().backward()
    except InputError as error:
        return str(error)
    return "nothing"


def gathered_labels():
    return find_circuits(nn.Sequential(NormalisedAttention(), nn.LayerNorm(16)), heads=True)


def attention(scale):
    torch.manual_seed(0)
    block = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        block.in_proj_weight *= scale
    return block


class Blocks(nn.ModuleDict):
    """Attention blocks by name, one after the other, but for those to skip."""

    skipped = ()

    def forward(self, x):
        for name, block in self.items():
            if name not in self.skipped:
                x = x + block(x, x, x, need_weights=False)[0]
        return x


def blocks_that_differ(rank, names, scale, skipped=(), group=None):
    """Which blocks a clip at rate 0 changed, and which the monitor has; ranks hold or run other blocks."""
    model = Blocks({name: attention(scale) for name in names})
    model.skipped = skipped
    before = weights(model)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    clip = qk_clip(model, optimizer, THRESHOLD, group=group)
    monitor = LogitMonitor(model, optimizer, every=1, limit=1e6, group=group)
    for _ in range(2):
        torch.manual_seed(rank)
        model(torch.randn(3, 5, 16)).pow(3).sum().backward()
        optimizer.step()
    changed = {name: not torch.equal(value, before[name]) for name, value in weights(model).items()}
    return {
        "changed": sorted({name.partition(".")[0] for name, it_did in changed.items() if it_did}),
        "total": clip.total,
        "monitor": {path: reading.logit.tolist() for path, reading in monitor.last.readings.items()},
    }


def main():
    # First, so that it finds no process group.
    result = {f"accelerate, {way}": accelerated(way) for way in ("first", "together", "sharded")}
    assert dist.get_backend() == "gloo"
    rank, processes = dist.get_rank(), dist.get_world_size()
    trainings = {
        "ddp": trained(gpt2(), DistributedDataParallel, rank, processes),
        "ddp, buckets": trained(
            gpt2(), lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True), rank, processes
        ),
        "fsdp2": trained(llama(), sharded, rank, processes),
        "fsdp2, fused": trained(gpt2(), sharded, rank, processes),
    }
    result |= {name: weights(model) for name, model in trainings.items()}
    for own_unit in (True, False):
        result[f"first pass, {own_unit}"] = refused_in_training(own_unit)
    for name, model, wrap in (
        ("clip, ddp", gpt2(), DistributedDataParallel),
        ("clip, fsdp2", llama(), sharded),
        ("clip, fused, fsdp2", gpt2(), sharded),
    ):
        clipped_model, clip, largest = clipped(model, wrap, rank, processes)
        result[name] = {**weights(clipped_model), "total": torch.tensor(clip.total), "largest": largest}
    clipped_model, clip, largest = clipped(llama(), lambda m: sharded(m, attention_too=True), rank, processes)
    result["clip, own units"] = {
        **weights(clipped_model),
        "total": torch.tensor(clip.total),
        "largest": largest,
    }
    result["clip, normalised"] = refused_by_clip()
    alone = [dist.new_group([other]) for other in range(processes)][rank]
    large = 6.0 if rank == 1 else 0.5
    mine = {
        "pipeline": blocks_that_differ(rank, [str(rank)], large),
        "same names": blocks_that_differ(rank, ["0"], large, group=alone),
        "skipping": blocks_that_differ(rank, ["0", "1"], 6.0, skipped=("1",) if rank == 1 else ()),
    }
    everyone = [None] * processes
    dist.all_gather_object(everyone, mine)
    result["ranks"] = everyone
    if rank == 0:
        torch.save(result, sys.argv[1])
    leave()


def leave():
    """End this process when all have come here, without tearing down what torch built.

    A DistributedDataParallel model that outlives its process group can wait forever in its destructor.
    """
    dist.barrier()
    os._exit(0)
