"""Code that the kernels of this backend share: layouts, intrinsics, ring buffers, the tile
scheduler and the online softmax.
"""
