"""All limits that tests compare numbers with, each with its reason. Two kinds, never mixed."""

import torch

from trtconvert.attention.modes import Mode
from trtconvert.linear.modes import LayerMode

# Near exact: two computations of the same (quantised) arithmetic, relative L2 error. --------------------------------------

SAME_ARITHMETIC = 2e-4
"""FP32 against FP32 or float64 in another order. Rounding alone is 2e-7; a value that lies on the edge between two integers
may round either way, and one such step in a small tensor is 1e-4 of it."""

SAME_FLOAT = 1e-6
"""Some rounding in FP32, of sums of up to a thousand products. 2e-7 was seen."""

ROUNDED_TO_HALF = 5e-4
"""An output rounded to FP16, whose unit roundoff is 2**-11."""

ROUNDED_INPUT = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Inputs and an output rounded to FP16 or BF16, by up to 2**-11 or 2**-8 of each element."""

ROUNDED_PROJECTION = 1e-3
"""As ROUNDED_TO_HALF, of a product and a bias that were rounded before it or not: where their sum is cast to FP32 at once, ONNX
Runtime leaves out roundings that it keeps where the product is joined with others. 6e-4 was seen."""

HALF_INPUTS = 5e-3
"""Queries, keys and values rounded to FP16 first: each moves by up to 2**-11 of itself, and roundings to INT8, steps of a
hundredth and more, fall the other way for a few in a hundred elements."""

PIXELS_AS_TOKENS = 2e-3
"""Convolutions of single pixels as products in half precision: what a convolution rounds once is rounded before the bias is added
and after. 8e-4 was seen of a U-Net with eight of them."""

SPLIT_PRODUCT = 2e-3
"""A product of half precision as the sum of two: up to four roundings by 2**-11 of an element, through two blocks."""

ROUNDED_SHIFT = 2e-3
"""A constant added to keys in FP32 and subtracted again moves them by up to 2**-22 of the constant, which flips some
roundings to INT8."""

WHOLE_DENOISER = 1e-3
"""As SAME_ARITHMETIC, through six blocks that pass such steps on."""

FLIPPED_CALL = 1e-2
"""The worst of many calls of a tiny random denoiser, whose tensors are so small that a handful of roundings that fall the other
way is 2e-3 of its output; of such calls the median keeps to WHOLE_DENOISER."""

HALF_DENOISER = 1e-2
"""As HALF_INPUTS, through six blocks in FP16 whose matrix products sum in FP16 or FP32 as a runtime likes."""

HALF_LAYERS = 1.5e-2
"""As HALF_INPUTS, through ten INT8 layers one behind the other in FP16, each of which rounds to steps of a hundredth: 9e-3 was
seen of Q/DQ and of the nodes' bodies."""

HISTOGRAM_STEP = {"q": 1 + 1 / 64, "k": 1 + 1 / 64, "v": 1 + 1 / 16}
"""A percentile read off a histogram lies in the same step as the element it stands for: 64 steps per octave, 16 for channels."""

LEAST_ERROR_RANGE = 0.03
"""Twice a step of 1.6 %: the range is a limit of the grid, and the error is flat around its least value."""

LEAST_ERROR_OF_ROWS = 1.05
"""Times the least error of any range: ranges are tried in steps of 5 %, on two rows of each call, and the error is flat around
its least value. 1.01 was seen."""

SAME_DOUBLE = 1e-13
"""Float64 against float64 in another order, relative: some hundred roundings of 1e-16."""

EIGENVALUES = 1e-6
"""Fréchet's distance takes square roots of eigenvalues: one that should be 0 and is 1e-15 becomes 3e-8, and there are several."""

SAME_IMAGES_PSNR = 50.0
"""dB. The digits model's samples on two devices: float32 summed in another order over ten steps."""

# Quantised against unquantised attention. -----------------------------------------------------------------------------------

MODE_ERROR = {Mode.FP16: 1e-6, Mode.PRECISION: 0.03, Mode.BALANCED: 0.035, Mode.AGGRESSIVE: 0.04}
"""Relative L2 error on tensors of N(0, 1) with biased keys, in FP32. The INT8 figures are about twice what N(0, 1) gives at
4096 keys (0.0155, 0.0183, 0.0190), since 200 keys average less noise away."""

INT4_ERROR = 0.15
"""The same with INT4 QKᵀ, whose steps are 18 times as large: about twice the 0.07 of 60 keys; 0.05 was seen of 200."""

INT8_CALL = 5e-2
"""Relative L2 error of the worst call of the tiny random pipelines but PixArt, INT8 and perhaps FP16 against torch without INT8:
1.2e-2 was seen, 2.0e-2 where torch is in FP32. One that takes its text for zeros is 0.11 off and more, its timestep 0.4, and the
images of either may keep to INT8_IMAGES_PSNR."""

INT8_IMAGES_PSNR = 20.0
"""dB, of images by random models over twenty steps, which amplify differences where trained ones draw them together: 27 to 30 dB
for the worst pipeline with three instruction sets, 43 and more for others."""

# Quantised against unquantised layers. -----------------------------------------------------------------------------------

INT8_WEIGHTS = 1e-2
"""Relative L2 error of a weight, or of what a small model makes of it, rounded to INT8 with a scale for each output channel:
0.006 of 32 channels of N(0, 1)."""

LAYER_ERROR = {LayerMode.WEIGHT_ONLY: 0.01, LayerMode.DYNAMIC: 0.014, LayerMode.STATIC: 0.018}
"""Relative L2 error on inputs and weights of N(0, 1). A step is the largest of a row's elements over 127, 3.3 / 127 of 1,024
channels, and rounding errs by a step over √12: 0.0075 for weights and as much for tokens; 0.010 where one scale is of all tokens,
whose largest element is 4.5. Squares add: 0.0075, 0.0106 and 0.013. Another third is for the luck of the draw."""

INT8_CONVS_OF_A_UNET = 0.025
"""Relative L2 error of four INT8 convolutions as plugins, with FP16 between them, against their specification in FP32: a
hundredth of the elements fall on the other side of an edge between two integers. 0.007 to 0.018 was seen; a scale of another bin
gives 0.05 and more."""

LAYERS_OF_A_BLOCK = 8e-3
"""Relative L2 error of ten INT8 layers as plugins against their specification: FP16 between them, and its rounding turns
some of the quantised numbers, each by one step."""
