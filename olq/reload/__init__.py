"""When things happen: what arrives, which units are whole, when a layer is done. Loads and reloads are one code."""
