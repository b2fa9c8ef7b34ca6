"""Operations beside attention, one folder each.

``formula.py`` is plain PyTorch: the definition, and what a CPU runs. ``kernel.py`` is the Triton
kernel. ``op.py`` chooses between the two and registers the op: schema, fake, device keys.
"""
