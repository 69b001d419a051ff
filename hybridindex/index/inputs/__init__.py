"""Files of vectors that a build reads: ``.npy``, ``.fvecs``, ``.bvecs``, Parquet, Arrow and HDF5."""
