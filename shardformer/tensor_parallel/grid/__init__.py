"""2D, 2.5D and 3D tensor parallelism, which arrange the tensor-parallel ranks in a grid."""
