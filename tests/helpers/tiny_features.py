"""Feature extractors for tests: `--features tiny_features:pixels` with this folder on the path."""

import torch

from trtconvert.evaluate.features import Features


def pixels(images):
    return images.flatten(1)


def a_list(images):
    return images.flatten(1).tolist()


def too_few(images):
    return images.flatten(1)[1:]


def too_few_logits(images):
    return Features(images.flatten(1), logits=images.flatten(1)[1:])


def a_map(images):
    return torch.stack([images, images])[0]
