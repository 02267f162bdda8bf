"""From image bytes to the nearest items of a gallery; never imports torch."""
