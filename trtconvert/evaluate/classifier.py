"""A small classifier of 8 × 8 digits.

Its logits tell whether a generated digit has the requested class. Its features serve for Fréchet distances: Inception's are
meaningless at this size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from trtconvert.models.checkpoint import load_weights

FEATURES = 64


class DigitsClassifier(nn.Module):
    """Two convolutions and two linear layers; 38 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, FEATURES),
            nn.ReLU(),
        )
        self.head = nn.Linear(FEATURES, 10)

    def features(self, images: Tensor) -> Tensor:
        """[B, 1, 8, 8] in [0, 1] → [B, FEATURES]."""
        return self.body(images)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 1, 8, 8] in [0, 1] → logits [B, 10]."""
        return self.head(self.features(images))


def load_digits_classifier(path: Path) -> DigitsClassifier:
    """Loads the trained classifier in evaluation mode, on the CPU.

    Raises:
        UserError: the file is missing, damaged, or not for this classifier.
    """
    classifier = DigitsClassifier()
    load_weights(classifier, path)
    return classifier.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(classifier: DigitsClassifier, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images [B, 1, 8, 8] in [0, 1] that are classified as their labels [B]."""
    return (classifier(images).argmax(1) == labels).double().mean().item()


def digits_data(split: str) -> tuple[Tensor, Tensor]:
    """Returns scikit-learn's digits (UCI Optical Recognition of Handwritten Digits); a fixed fifth of each class is held out.

    Args:
        split: "train" (1437 images, for the model and the classifier) or "test" (360 images).
    Returns:
        images [N, 1, 8, 8] FP32 in [0, 1], labels [N] INT64.
    """
    # A slow import that only training and tests need.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    parts = train_test_split(pixels, digits, test_size=0.2, stratify=digits, random_state=0)
    pixels, digits = parts[:3:2] if split == "train" else parts[1::2]
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images, torch.tensor(digits, dtype=torch.int64)
