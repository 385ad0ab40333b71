"""The arithmetic in plain PyTorch: what every kernel must equal, byte for byte, and what runs on a CPU.

chunks     walk a tensor of any shape in boxes of bounded size; the one scratch budget
source     bring one box of a weight into float32: `through` rounding, saturation
rounding   float32 to E4M3 and E2M1 codes and back, by exact steps
scales     largest magnitude of a unit to its decode scale and to the factor that encodes
places     where a block's scale byte goes in a whole weight's scale tensor
fp8, mxfp8, nvfp4   a whole tensor, from the parts above
activations, silu   rows of activations in their output layouts; SiLU by exact float32 steps
swizzle, packing    bytes into the orders that kernels read
random, indexed     dummy values by seed, name and index; a strided tensor cut by global index

Results are written into storage that the caller owns. Nothing here checks arguments: olq.ops does.
"""
