"""A job in three dimensions: known sizes, published meshes, and one that trains on eight ranks."""
