"""The default kernels that spill registers: (device, size of the call, dtype, head dim, pass) to
the bytes that a thread spills at most with either release of Triton, and why that is left so.

All other default kernels have no spills. "small" are calls too small for tensor
descriptors, on a device that has them; all others are "large".
"""

# Tiles of 16 x 16 are the smallest that multiply.
FLOAT32 = "float32 rows of this length spill even with the smallest tile"
ASSEMBLER = "the assembler stops short of 255 registers by itself"
MEASURED = "the tile was measured on this device, and ones that spill nothing are slower"
FILLED = "more than 128 registers would leave warps out; addresses spill, and a path that is rare"
OUTPUT = "128 registers hold the output; addresses of keys spill, once for each tile"
UNTUNED = "a tile that is as fast and spills nothing has not been looked for yet"

ALLOWED = {
    ("sm_90", "large", "bfloat16", 64, "dK and dV"): (168, MEASURED),
    ("sm_100", "large", "bfloat16", 64, "dQ"): (16, UNTUNED),
    ("sm_90", "large", "bfloat16", 128, "dK and dV"): (80, UNTUNED),
    ("sm_100", "large", "bfloat16", 128, "delta"): (128, ASSEMBLER),
    ("sm_100", "large", "bfloat16", 128, "dK and dV"): (16, UNTUNED),
    ("sm_86", "large", "bfloat16", 256, "dQ"): (8, ASSEMBLER),
    ("sm_89", "large", "bfloat16", 256, "dQ"): (8, ASSEMBLER),
    ("sm_90", "large", "bfloat16", 256, "dK"): (24, MEASURED),
    ("sm_90", "large", "bfloat16", 256, "dQ"): (96, MEASURED),
    ("sm_100", "large", "bfloat16", 256, "delta"): (88, ASSEMBLER),
    ("sm_120", "large", "bfloat16", 256, "dV"): (16, ASSEMBLER),
    ("sm_120", "large", "bfloat16", 256, "dQ"): (16, ASSEMBLER),
    ("sm_90", "large", "bfloat16", 512, "dK"): (8, ASSEMBLER),
    ("sm_90", "large", "bfloat16", 512, "dV"): (16, ASSEMBLER),
    ("sm_100", "large", "bfloat16", 512, "dK"): (8, ASSEMBLER),
    ("sm_100", "large", "bfloat16", 512, "dV"): (16, ASSEMBLER),
    ("sm_120", "large", "bfloat16", 512, "dV"): (24, ASSEMBLER),
    ("sm_90", "large", "float32", 64, "dK and dV"): (384, MEASURED),
    ("sm_90", "large", "float32", 128, "forward"): (432, MEASURED),
    ("sm_90", "large", "float32", 128, "dK"): (64, MEASURED),
    ("sm_90", "large", "float32", 128, "dV"): (224, MEASURED),
    ("sm_90", "large", "float32", 128, "dQ"): (16, MEASURED),
    ("sm_80", "large", "float32", 256, "dK"): (240, FLOAT32),
    ("sm_80", "large", "float32", 256, "dV"): (8, FLOAT32),
    ("sm_80", "large", "float32", 256, "dQ"): (16, FLOAT32),
    ("sm_86", "large", "float32", 256, "dK"): (192, FLOAT32),
    ("sm_89", "large", "float32", 256, "dK"): (192, FLOAT32),
    ("sm_90", "large", "float32", 256, "dK"): (248, FLOAT32),
    ("sm_90", "large", "float32", 256, "dQ"): (8, FLOAT32),
    ("sm_100", "large", "float32", 256, "delta"): (8, ASSEMBLER),
    ("sm_100", "large", "float32", 256, "dK"): (264, FLOAT32),
    ("sm_120", "large", "float32", 256, "dK"): (288, FLOAT32),
    ("gfx942", "large", "float32", 256, "dK"): (800, FLOAT32),
    ("gfx942", "large", "float32", 256, "dQ"): (444, FLOAT32),
    ("sm_80", "large", "float32", 512, "delta"): (8, ASSEMBLER),
    ("sm_80", "large", "float32", 512, "dK"): (2056, FLOAT32),
    ("sm_80", "large", "float32", 512, "dQ"): (40, FLOAT32),
    ("gfx942", "large", "float32", 512, "forward"): (540, FLOAT32),
    ("gfx942", "large", "float32", 512, "dK"): (1636, FLOAT32),
    ("gfx942", "large", "float32", 512, "dV"): (568, FLOAT32),
    ("gfx942", "large", "float32", 512, "dQ"): (2028, FLOAT32),
}

# The same for split KV loops: (device, head dim, case of `decoding.py`).
ALLOWED_IN_DECODING = {
    ("sm_90", 128, "one query"): (16, ASSEMBLER),
    ("sm_80", 64, "pages of 16"): (8, ASSEMBLER),  # only with the newest Triton
    ("sm_89", 512, "one query"): (24, ASSEMBLER),  # of a float8 cache
    ("sm_90", 512, "one query"): (8, ASSEMBLER),
    ("sm_90", 576, "latent keys"): (560, OUTPUT),
    ("sm_90", 576, "latent keys, pages of 16"): (464, OUTPUT),
    ("sm_80", 576, "latent keys"): (16, ASSEMBLER),  # only with the oldest Triton
    ("sm_86", 576, "latent keys, pages of 16"): (8, ASSEMBLER),
    ("sm_89", 576, "latent keys, pages of 16"): (8, ASSEMBLER),
    ("sm_120", 576, "latent keys, pages of 16"): (8, ASSEMBLER),
    ("sm_100", 576, "latent keys, pages of 16"): (8, ASSEMBLER),
    ("sm_100", 128, "one query"): (8, UNTUNED),  # only with the newest Triton
    ("sm_100", 512, "pages of 16"): (8, ASSEMBLER),
}

# The kernel that quantises: (head dim, rotary dim) to bytes.
ALLOWED_IN_QUANTIZING = {
    (64, 0): (160, FILLED),
    (128, 0): (96, FILLED),
    (256, 0): (80, FILLED),
    (256, 128): (192, FILLED),
}
