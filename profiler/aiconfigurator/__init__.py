"""Import of the tables that ship with AIConfigurator (package aiconfigurator-core, Apache-2.0).

source      where the tables are, which systems, back ends and versions there are, and reading one
attention   modules of DSA, MSA and MLA layers, and plain attention kernels, with the rows that cannot be right
gemm        matrix products, interpolated to a model's shapes
experts     routed experts, with the load that the measured rank really had
collectives collective operations
convert     all of it together as a bundle of module granularity
"""
