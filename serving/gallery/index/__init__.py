"""The FAISS file of a gallery: which type, how it is built, measured, loaded and made anew."""
