"""INT8 linear layers and convolutions: their arithmetic, and their discovery in models."""
