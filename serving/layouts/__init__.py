"""How data sets lie on disk, one file a layout; `serving.catalog` is the way in."""
