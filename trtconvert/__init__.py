"""trtconvert: diffusion models to TensorRT engines with INT8 attention that follows the denoising timestep."""

__version__ = "0.1.0"
