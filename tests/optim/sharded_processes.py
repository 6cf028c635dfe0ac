"""What two, then three of three processes do with fused weights under FSDP2; the first writes the results.

usage: python tests/processes.py 3 sharded_processes.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

from fasterqk import check_circuits, find_circuits, make_optimizer
from fasterqk.errors import InputError
from fasterqk.optim import normalize_gradients, scale_circuits

# FASTERQK_SHARDED_STEPS=50 for the whole way; few steps already differ where slices are wrong.
STEPS = int(os.environ.get("FASTERQK_SHARDED_STEPS", "10"))
HALF, ROWS, LENGTH, VOCABULARY = STEPS * 4 // 5, 6, 6, 20


class Encoder(nn.Module):
    """Rows of one weight, in a model of torch's own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        layer = nn.TransformerEncoderLayer(10, 2, 12, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.body(self.embed(input_ids)))


def gpt2(width=16):
    """Columns."""
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    size = {"n_layer": 2 if width > 4 else 1, "n_head": 2, "n_embd": width, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **size, **off))


def phi3():
    """Rows; keys and values of half the heads."""
    size = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    model = Phi3ForCausalLM(Phi3Config(**size, num_key_value_heads=2, **tokens, use_cache=False))
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__ == "Phi3RMSNorm":  # which computes in float32
                setattr(module, name, nn.RMSNorm(16))
    return model


def falcon():
    """Rows that repeat from head to head."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    kind = {"multi_query": False, "new_decoder_architecture": False, "use_cache": False}
    return FalconForCausalLM(FalconConfig(**size, **off, **kind))


def small():
    """Fewer rows than processes have shards of: some are empty."""
    return gpt2(4)


MODELS = {"gpt2": gpt2, "phi3": phi3, "encoder": Encoder, "falcon": falcon, "small": small}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def sharded(model, **options):
    mesh = MESHES[-1]
    for module in list(model.modules()):
        if type(module).__name__ in ("GPT2Block", "Phi3DecoderLayer", "TransformerEncoderLayer"):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draw) for _ in range(STEPS)]


LABELS = {}
MESHES = []  # the last is that of the processes at work
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def optimizer_of(model, kind=optim.AdamW, **options):
    """The labels of each model are found once, on the first that is passed, sharded or not."""
    sizes = tuple(parameter.shape for parameter in model.parameters())
    if "circuits" not in options:
        LABELS[sizes] = options["circuits"] = LABELS.get(sizes) or find_circuits(model)
    settings = {"lr": 1e-2, "weight_decay": 0.1} | ({} if "ratios" in options else {"qk_ratio": 10})
    return make_optimizer(model, kind, **settings | options)


def train(model, optimizer, first=0, last=STEPS, rank=0, processes=1):
    for ids in batches()[first:last]:
        mine = ids[rank::processes]
        loss_of(mine)(model(input_ids=mine)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def loss_of(ids):
    """A loss in the dtype of the model; transformers' own is float32."""

    def loss(outputs):
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return loss


def weights(model):
    """Whole tensors, also of a sharded model."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def said(call):
    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing"


class Attention(nn.Module):
    """One linear layer for q, k and v, for tensor parallelism."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(context.transpose(1, 2).flatten(2))


def parallel(rank, processes, alone=False):
    """Weights after some steps of a model whose fused projection is sharded over its output features."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).double()
    circuits = find_circuits(model, inputs=torch.randn(2, 3, 12), verify=True)
    if not alone:
        plan = ColwiseParallel(output_layouts=Replicate())
        model = parallelize_module(model, MESHES[-1], {"0.qkv": plan, "1.qkv": plan})
    optimizer = optimizer_of(model, circuits=circuits)
    for number in range(5):
        inputs = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(number)).double()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def hazards(rank, processes):
    """What is said of each thing that cannot work."""
    before = made("gpt2")
    early = optimizer_of(before)
    sharded(before)
    frozen = made("phi3")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("qkv_proj" not in name)
    sharded(frozen)
    matrices = {"others": (optim.AdamW, {"lr": 1e-3})}
    whole, parts = made("gpt2"), sharded(made("gpt2"))
    of_parts = optimizer_of(parts)
    train(parts, of_parts, 0, 1, rank, processes)
    state = of_parts.state_dict()
    for module in (*parts.transformer.h, parts):
        module.unshard()
    return {
        "sharded later": said(lambda: train(before, early, 0, 1, rank, processes)),
        "unsharded": said(of_parts.step),
        "sharded state": said(lambda: optimizer_of(whole).load_state_dict(state)),
        "frozen": said(lambda: optimizer_of(frozen)),
        "Adafactor": said(lambda: optimizer_of(sharded(made("phi3")), optim.Adafactor)),
        "Muon": said(lambda: optimizer_of(sharded(made("phi3")), optim.Muon, **matrices)),
    }


def checked(rank, processes):
    """``check_circuits`` of a sharded model in training: its rows, and whether it left all as it was."""
    model = sharded(made("phi3"))
    optimizer = optimizer_of(model, decay="independent")
    train(model, optimizer, 0, 3, rank, processes)
    ids = batches()[5]
    result = check_circuits(model, optimizer, {"input_ids": ids}, loss_of(ids))
    plain = optim.SGD(model.parameters(), lr=0.1)
    of_plain = check_circuits(model, plain, {"input_ids": ids}, loss_of(ids))
    rows = [(row.circuit, row.parameters, round(row.measured, 6), row.ok) for row in result.rows]
    return {"rows": rows, "plain": of_plain.ok, "weights": train(model, optimizer, 3, 6, rank, processes)}


def resumed(folder, name, rank, processes):
    """Weights at the end of a training that another number of processes has begun."""
    model = sharded(made(name))
    optimizer = optimizer_of(model)
    state, entries = get_state_dict(model, optimizer, options=FLAT if name == "small" else None)
    both = {"model": state, "optimizer": entries}
    dcp.load(both, checkpoint_id=folder / f"{name}-2")
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    return train(model, optimizer, HALF, STEPS, rank, processes)


def by_columns(name, rank, processes):
    """Weights after a training in which each process holds columns of every matrix."""
    model = sharded(made(name), shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    return train(model, optimizer_of(model), 0, STEPS, rank, processes)


def other_ways(folder, rank, processes):
    """Further ways to shard, to save and to scale."""
    ids = batches()[0]
    half = sharded(made("phi3").float(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = optimizer_of(half, fused=True)
    for _ in range(3):
        loss_of(ids)(half(input_ids=ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = made("gpt2")
    first = optimizer_of(alone)
    train(alone, first, 0, HALF)
    converted = sharded(alone_copy(alone))
    second = optimizer_of(converted)
    second.load_state_dict(first.state_dict())  # whole tensors into sharded ones
    roles = sharded(made("gpt2"))
    by_role = optimizer_of(roles, optim.NAdam, ratios={"q": 10, "k": 3, "v": 2})
    scaled = sharded(made("phi3"))
    scale_circuits(scaled, qk=4.0)
    loss_of(ids)(scaled(input_ids=ids)).backward()
    norms = normalize_gradients(scaled, {"qk": 1.0, "ov": 1.0})
    return {
        "half": all(bool(value.isfinite().all()) for value in weights(half).values()),
        "converted": train(converted, second, HALF, STEPS, rank, processes),
        "roles": train(roles, by_role, 0, 4, rank, processes),
        "groups": [len(group["params"]) for group in by_role.param_groups],
        "norms": [norms, normalize_gradients(scaled, {"qk": 1.0, "ov": 1.0})],
        "scaled": weights(scaled),
    }


def alone_copy(model):
    copy = made("gpt2")
    copy.load_state_dict(model.state_dict())
    return copy


def results(folder, rank, processes):
    result = {}
    for name in MODELS:
        model = sharded(made(name))
        optimizer = optimizer_of(model)
        train(model, optimizer, 0, HALF, rank, processes)
        if processes == 2:
            state, entries = get_state_dict(model, optimizer, options=FLAT if name == "small" else None)
            both, group = {"model": state, "optimizer": entries}, MESHES[-1].get_group()
            dcp.save(both, checkpoint_id=folder / f"{name}-2", process_group=group)
        else:
            result[f"{name}, resumed"] = resumed(folder, name, rank, processes)
        result[name] = train(model, optimizer, HALF, STEPS, rank, processes)
    result |= hazards(rank, processes) | checked(rank, processes) | other_ways(folder, rank, processes)
    result["parallel"] = parallel(rank, processes)
    if processes == 2:  # torch shards columns evenly or not at all
        result["columns"] = {name: by_columns(name, rank, processes) for name in MODELS}
    return result


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, everything = dist.get_rank(), {}
    for processes in (2, 3):
        MESHES.append(DeviceMesh("cpu", list(range(processes))))
        if rank < processes:
            everything[processes] = results(folder, rank, processes)
        dist.barrier()
    if rank == 0:
        torch.save(everything, folder / "results.pt")
    dist.barrier()
    os._exit(0)  # without tearing down what torch built
