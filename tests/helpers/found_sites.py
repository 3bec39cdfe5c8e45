"""The attention sites of a model, without layers."""

from trtconvert.attention.sites import Site
from trtconvert.calib.calibrate import parts_to_convert
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.recipe import AttentionSection, LayersSection


def sites_to_convert(model: DiffusionModel, section: AttentionSection) -> tuple[list[Site], list[Site]]:
    """Returns the converted sites and the others."""
    parts = parts_to_convert(model, section, LayersSection(modes="off"))
    return parts.sites, parts.left_sites
