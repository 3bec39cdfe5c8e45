"""Tables of attention sites in calibration files: reading and checking."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtconvert.attention.reference import AttentionTables
from trtconvert.documents import require_plain_types, safetensors_header
from trtconvert.errors import UserError
from trtconvert.provenance import Provenance, not_a_calibration, provenance_in

NAMES = tuple(f.name for f in fields(AttentionTables) if f.name != "modes")
"""Names of the tables that a calibration has for each site."""


def read_tensors(path: Path, kinds: Collection[str] | None = None) -> tuple[Provenance, dict[str, dict[str, Tensor]]]:
    """Reads a calibration file.

    Args:
        kinds: of the tensors to read; default: all.
    Returns:
        The provenance, and the tensors of each site, layer or input by kind.
    Raises:
        UserError: the file is missing, damaged, or not a calibration.
    """
    found: dict[str, dict[str, Tensor]] = {}
    try:
        header = safetensors_header(path)
        provenance = provenance_in(header)
        require_plain_types(header)
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name, _, kind = key.rpartition("/")
                if kinds is None or kind in kinds:
                    found.setdefault(name, {})[kind] = file.get_tensor(key)
    except (OSError, SafetensorError, ValueError) as error:
        raise not_a_calibration(path, error) from error
    return provenance, found


def read_tables(path: Path) -> tuple[Provenance, dict[str, dict[str, Tensor]]]:
    """Reads the attention tables of a calibration file: of each site the tensors of `AttentionTables` except the modes.

    Raises:
        UserError: as `read_tensors`; or a table is not usable.
    """
    provenance, tables = read_tensors(path, NAMES)
    for site, named in tables.items():
        refuse_flaw(path, site, flaw(named, provenance.bins))
    return provenance, tables


def refuse_flaw(path: Path, name: str, found: str, *, of_layer: bool = False) -> None:
    """Raises an error for the tables of a site or a layer that cannot be used.

    Args:
        found: the flaw, see `flaw`; empty: no error.
    Raises:
        UserError: `found` is not empty.
    """
    if found:
        of_sites = "finite tables of every kind for each timestep bin and head, their scales positive"
        of_layers = "finite scales of every kind for the input of each layer, positive except offsets"
        raise UserError(
            f"{path} holds {'scales' if of_layer else 'tables'} that cannot be used",
            expected=of_layers if of_layer else of_sites,
            got=f"{name}: {found}" if of_layer else f"tables of {name} {found}",
            remedy="calibrate again",
        )


def flaw(
    named: Mapping[str, Tensor],
    bins: int,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> str:
    """Returns why the tables of a site cannot be used; empty if they can. Sizes that are None are taken from the tables, which
    must then agree with each other."""
    wanted = set(NAMES)
    if missing := sorted(wanted - named.keys()):
        return f"without {', '.join(missing)}"
    if unknown := sorted(named.keys() - wanted):
        return f"with unknown {', '.join(unknown)}"
    if any(x.dim() == 0 or len(x) != bins for x in named.values()):
        return f"for other timestep bins than {bins}"
    q, v = named["q_scale"].shape, named["v_scale"].shape
    heads = heads if heads is not None else (q[1] if len(q) == 2 else 0)
    kv_heads = kv_heads if kv_heads is not None else (v[1] if len(v) == 3 else 0)
    head_dim = head_dim if head_dim is not None else (v[2] if len(v) == 3 else 0)
    by_head, by_kv_head, by_channel = (bins, heads), (bins, kv_heads), (bins, kv_heads, head_dim)
    shapes = {name: by_channel for name in wanted} | {"q_scale": by_head, "k_scale": by_kv_head}
    for name in sorted(wanted):
        x = named[name]
        if tuple(x.shape) != shapes[name] or not x.numel() or x.dtype != torch.float32:
            return f"with {name} of {list(x.shape)} {x.dtype}, where FP32 {list(shapes[name])} is needed"
    if heads % kv_heads:
        return f"for {heads} query heads, which is no multiple of {kv_heads} key heads"
    if any(not x.isfinite().all() or (name.endswith("_scale") and (x <= 0).any()) for name, x in named.items()):
        return "with NaN, Inf, or scales that are not positive"
    return ""
