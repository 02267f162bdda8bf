"""What each of two processes does in test_processes.py; started by torchrun.

Arguments: the folder of the images, the folder to write to, the recipes, of which the last one is trained.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import crossbatch
from serving.catalog.catalog import read
from training.data.partition import divide
from training.data.pictures import Pictures, training_decoder, viewing_decoder
from training.loop.processes import gather_rows, gather_shares, mean_gradients, share, start_processes
from training.loop.trainee import build_network, start_trainee
from training.network.embedder import embedder_function
from training.recipes.recipe_file import load_recipe


def gradients(data: Path, recipe_file: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Run one step's forward and backward pass; gives every gradient, the loss, and the embeddings of all."""
    recipe = load_recipe(recipe_file)
    torch.set_num_threads(1)
    fabric = start_processes(device, recipe)
    partition = divide(read(data), recipe)
    pictures = Pictures(partition.train, training_decoder(recipe), keep=1e9, label="Reading")
    network = build_network(recipe, classes=len(pictures.classes), fresh=True)
    trainee = start_trainee(recipe, network, pictures, fabric=fabric, fresh=True)
    views = Pictures(partition.train, viewing_decoder(recipe), keep=1e9, label="Reading")
    mine = share(list(range(12)), fabric)
    pixels = torch.stack([torch.from_numpy(views[i].copy()) for i in mine])
    trainee.embedder.train()
    for layer in trainee.embedder.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.eval()
    features = trainee.forward(trainee.embedder.normalise(pixels))
    parts = (features.embeddings, features.histograms, torch.from_numpy(pictures.labels[mine]))
    batch = (gather_rows(part, fabric) for part in parts)
    terms = trainee.objective(*batch, step=0, weight=0.3, halves=torch.Generator().manual_seed(3))
    fabric.backward(terms.total)
    for parameter in trainee.objective.parameters():  # as rounding may do, in each process its own way
        assert parameter.grad is not None
        parameter.grad += fabric.global_rank
    mean_gradients(trainee.objective, fabric)
    found = {
        f"{name}.{key}": parameter.grad.clone()
        for name, module in (("model", trainee.embedder), ("objective", trainee.objective))
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    embed = embedder_function(trainee.embedder)
    part = views.share(fabric.global_rank, fabric.world_size)
    embedded = np.concatenate([embed(image[None].copy()) for image in part])
    found["embedded"] = gather_shares(torch.from_numpy(embedded), len(views), fabric)
    return found | {"total": terms.total.detach()}


if __name__ == "__main__":
    data, out, *recipes = sys.argv[1:]
    for recipe in recipes:
        found = {name: value.contiguous() for name, value in gradients(Path(data), recipe).items()}
        save_file(found, f"{out}/{Path(recipe).stem}.{torch.distributed.get_rank()}")
    torch.distributed.barrier()
    sys.exit(crossbatch.main(["train", recipes[-1], "--data", data, "--out", f"{out}/run"]))
