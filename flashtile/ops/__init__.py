"""Operations other than attention, one folder each.

``formula.py`` is plain PyTorch: it defines the operation, and runs on a CPU. ``kernel.py`` is the
Triton kernel. The folder's ``__init__`` chooses between the two and registers the op: schema, fake,
device keys; it has the formula itself where that is two lines.
"""
