"""The attention op: its reference in torch, the op over the C API, timestep schedules, and where sites are intercepted."""
