"""INT8 linear layers and convolutions: their arithmetic, and where a model has them."""
