"""Files of calibration data."""

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from support import REPOSITORY

from trtconvert.calib.data import BadSamples, open_data
from trtconvert.recipe import CalibrationSection

RECIPE = REPOSITORY / "recipes" / "digits-dit.yaml"


def inputs_of(model, data, skip=False, **fields):
    """Returns the denoiser's inputs, call by call, and the skipped samples."""
    seen, bad = [], BadSamples(skip)
    fields = {"samples": 6, "batch": 4, "steps": 5} | fields
    opened = open_data(model, CalibrationSection(data=data, **fields), bad)

    def denoiser(x, timestep, **conditions):
        seen.append({"x": x, "timestep": timestep} | conditions)
        return torch.zeros_like(x)

    batches = list(opened.batches)
    assert opened.count in (None, len(batches))
    for batch in batches:
        batch(denoiser)
    return seen, bad.take()


def write_images(folder, count=6, size=(8, 8)):
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, size[1], size[0]), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    return torch.from_numpy(pixels[:, None] / np.float32(255))


def write_inputs(path, inputs):
    arrays = {name: x.numpy() for name, x in inputs.items()}
    match path.suffix:
        case ".npz" if "small" in path.name:
            np.savez_compressed(path, **arrays)
        case ".npz":
            np.savez(path, **arrays)
        case ".pt":
            torch.save(inputs, path)
        case _:
            save_file(inputs, path)
    return path
