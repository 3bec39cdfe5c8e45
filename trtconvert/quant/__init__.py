"""Operations of a model, and how they run in INT8 in torch."""
